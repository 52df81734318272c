// The trace viewer: a list of questions, the steps of one question, and its passages.

const VERDICTS = ["right", "wrong", "unscored", "failed", "unfinished"];
const GRANULARITIES = ["triple", "sentence", "passage", "default"];
const BATCH = 60; // list entries drawn at a time

function folded(label, draw) { // a folded section, drawn when it is first opened
  const node = el("details", "", el("summary", "", label));
  node.addEventListener("toggle", () => {
    if (node.open && node.childElementCount === 1) node.append(draw());
  });
  return node;
}

// ---------------------------------------------------------------------------------- passages

const passages = new Map();
function passage(number) {
  if (!passages.has(number)) passages.set(number, data("p" + number));
  return passages.get(number);
}
const titleOf = (number) => passage(number).title.trim() || passage(number).id;

let origin = null; // the button that opened a passage

function jump(number, sentence, from) {
  const node = $("sources").querySelector(`[data-passage="${number}"]`);
  if (!node) return;
  for (const old of document.querySelectorAll(".target")) old.classList.remove("target");
  for (const old of document.querySelectorAll(".return")) old.remove();
  node.open = true;
  drawBody(node);
  const target = sentence === null ? null : node.querySelector(`[data-sentence="${sentence}"]`);
  (target ?? node).classList.add("target");
  origin = from;
  node.querySelector(".body").append(button("return", goBack, "↩ back"));
  (target ?? node).scrollIntoView({ block: target ? "center" : "start" });
}

function goBack() {
  for (const old of document.querySelectorAll(".return")) old.remove();
  if (!origin) return;
  origin.scrollIntoView({ block: "center" });
  origin.focus({ preventScroll: true });
  origin = null;
}

let currentQuestion = null;

function drawBody(node) {
  if (node.querySelector(".body")) return;
  const number = Number(node.dataset.passage);
  const has = (pairs, s) => pairs.some((pair) => pair[0] === number && pair[1] === s);
  const body = el("div", "body");
  passage(number).sentences.forEach((sentence, index) => {
    const span = text(sentence.trim(), "s");
    span.dataset.sentence = index;
    if (has(currentQuestion.core, index)) span.classList.add("core");
    if (has(currentQuestion.gold_sentences, index)) span.classList.add("gold");
    body.append(span, " ");
  });
  node.append(body);
}

function drawPassages(q) {
  const rounds = new Map();
  const addPassage = (number, round) => {
    if (!rounds.has(number)) rounds.set(number, new Set());
    if (round) rounds.get(number).add(round);
  };
  q.steps.forEach((step, index) => step.passages.forEach((number) => addPassage(number, index + 1)));
  for (const [number] of q.core) addPassage(number);
  for (const number of q.gold_passages) addPassage(number);
  const core = new Set(q.core.map((pair) => pair[0]));
  const gold = new Set(q.gold_passages);
  const rank = (number) => (core.has(number) ? 0 : 2) + (gold.has(number) ? 0 : 1);
  const order = [...rounds.keys()].sort((a, b) => rank(a) - rank(b)); // stable: ties are in the order of retrieval
  const nodes = order.map((number) => {
    const steps = [...rounds.get(number)];
    const node = el("details", "passage", el("summary", "",
      el("b", "", titleOf(number)),
      core.has(number) && el("span", "pill core", "core"),
      gold.has(number) && el("span", "pill gold", "gold"),
      el("span", "rounds", steps.length ? "step " + steps.join(", ") : "not retrieved")));
    node.dataset.passage = number;
    node.addEventListener("toggle", () => node.open && drawBody(node));
    if (rank(number) < 3) { node.open = true; drawBody(node); }
    return node;
  });
  const missing = q.gold_missing.map((id) => el("div", "passage",
    el("span", "soft", "Not retrieved: "), text(id), " ", el("span", "pill gold", "gold")));
  $("sources").replaceChildren(
    el("h2", "", plural(order.length, "passage")),
    el("div", "legend",
      el("span", "", el("span", "s core", "core"), " source of a core fact"),
      q.gold_sentences.length > 0 && el("span", "", el("span", "s gold", "gold"), " annotated"),
      el("span", "", el("span", "s chosen", "chosen"), " clicked")),
    ...missing, ...nodes);
  $("sources").scrollTop = 0;
}

// -------------------------------------------------------------------------------- one question

const isTriple = (unit) => unit[0] !== null;
const triple = (fact) => el("span", "triple text",
  el("b", "", fact[0]), el("i", "", fact[1]), el("b", "", fact[2]));

function drawUnit(unit) { // a triple, a sentence, or a passage
  if (isTriple(unit)) return triple(unit);
  if (unit[3] === null) return text(unit[2]);
  const sentence = unit[4] === null ? undefined : passage(unit[3]).sentences[unit[4]];
  return text(sentence === undefined ? titleOf(unit[3]) : sentence.trim());
}

function sourceOf(fact) {
  if (fact[3] === null) return "source unknown";
  const sentence = fact[4] === null ? "" : ` · sentence ${fact[4] + 1}`;
  return cut(titleOf(fact[3])) + sentence;
}

const coreFact = (fact) => button("fact", (node) => fact[3] !== null && jump(fact[3], fact[4], node),
  drawUnit(fact),
  el("span", "source", fact[5] && el("span", "pill gold", "gold"), " ", sourceOf(fact), " ↗"));

function part(label, ...children) {
  return el("div", "part", el("div", "label", label), ...children);
}

function candidates(step) {
  const key = (unit) => JSON.stringify(isTriple(unit) ? unit.slice(0, 3) : unit.slice(2, 5));
  const kept = new Set(step.kept.map(key));
  const rows = step.candidates.map((fact, index) => el("tr", kept.has(key(fact)) ? "core" : "",
    el("td", "n", index + 1),
    el("td", "n", step.scores[index] === undefined ? "" : step.scores[index].toFixed(3)),
    el("td", "", button("", (node) => fact[3] !== null && jump(fact[3], fact[4], node), drawUnit(fact)),
      " ", fact[5] && el("span", "pill gold", "gold"),
      kept.has(key(fact)) && el("span", "pill core", "core"))));
  return el("table", "", el("thead", "", el("tr", "",
    el("th", "", "#"), el("th", "", "score"), el("th", "", step.candidates.every(isTriple) ? "fact" : "unit"))), el("tbody", "", rows));
}

function drawStep(step, index, q) {
  const gold = new Set(q.gold_passages);
  const found = step.passages.map((number) => button(gold.has(number) ? "gold" : "",
    (node) => jump(number, null, node), cut(titleOf(number), 40)));
  const facts = [...step.kept, ...step.candidates].every(isTriple);
  const core = facts ? "Core facts" : "Kept";
  return el("section", "step",
    el("span", "number", index + 1),
    text(step.query, "query"),
    step.more_queries.length > 0 && part("More queries", step.more_queries.map((query) => el("div", "", text(query)))),
    found.length > 0 && part(`${plural(found.length, "passage")} retrieved`, el("div", "found", found)),
    step.thought.trim() !== "" && part("Thought", el("div", "thought", text(step.thought.trim()))),
    step.kept.length > 0 && part(core, step.kept.map(coreFact)),
    step.kept.length === 0 && step.candidates.length > 0 && part(core, el("div", "soft", "none kept")),
    step.next_query !== null && el("div", "part next", "Next query → ", text(step.next_query)),
    el("div", "more",
      step.candidates.length > 0 && folded(plural(step.candidates.length, facts ? "candidate fact" : "candidate"), () => candidates(step)),
      Object.keys(step.notes).length > 0 && folded("Notes", () => el("pre", "raw text", JSON.stringify(step.notes, null, 2))),
      step.response !== "" && folded("Model's response", () => el("pre", "raw text", step.response))));
}

function drawAttempt(attempt) {
  const uncalled = attempt.evidence.length === 0 && attempt.response === "";
  const state = attempt.sufficient ? "sufficient" : uncalled ? "skipped, no evidence" : "refused";
  return el("div", attempt.sufficient ? "try sufficient" : "try",
    el("div", "head",
      el("span", "granularity", attempt.granularity),
      el("span", "said", text(attempt.answer)),
      el("span", attempt.sufficient ? "pill sufficient" : "pill", state)),
    el("div", "more",
      attempt.evidence.length > 0 && folded(plural(attempt.evidence.length, attempt.granularity) + " read",
        () => el("ol", "small", attempt.evidence.map((item) => el("li", "", text(item))))),
      attempt.response !== "" && folded("Model's response", () => el("pre", "raw text", attempt.response))));
}

function drawFigures(q) {
  const figure = (value, label) => el("span", "", el("b", "", value), " ", label);
  const count = (n) => n.toLocaleString("en");
  const asked = q.calls.generate ?? 0;
  const lookups = Object.values(q.calls).reduce((a, b) => a + b, 0) - asked;
  const kinds = Object.entries(q.calls).map(([kind, n]) => `${n} ${kind.replace("_", " ")}`).join(", ");
  const line = el("div", "figures",
    q.f1 !== null && figure(q.f1.toFixed(2), "F1"),
    figure(count(q.steps.length), q.steps.length === 1 ? "step" : "steps"),
    figure(count(asked), asked === 1 ? "model call" : "model calls"),
    figure(count(lookups), lookups === 1 ? "lookup" : "lookups"),
    figure(count(q.usage.prompt_tokens), q.usage.cached_tokens ? `prompt tokens (${count(q.usage.cached_tokens)} cached)` : "prompt tokens"),
    figure(count(q.usage.generated_tokens), "new tokens"),
    figure(q.seconds.toFixed(1), "s"),
    q.usage.cost > 0 && figure(q.usage.cost.toFixed(4), "cost"));
  line.title = visible(kinds);
  return line;
}

function drawAnnotation(q) {
  const rows = q.gold_facts.map((fact) => el("div", "gold-row", triple(fact),
    el("span", fact[3] ? "pill core" : "pill", fact[3] ? "among the core facts" : "not kept")));
  q.decomposition.forEach((part, index) => rows.push(el("div", "gold-row",
    el("span", "", el("span", "soft", `${index + 1}. `), text(part.question)), el("b", "", text(part.answer)))));
  return rows.length === 0 ? [] : [el("h2", "", "Annotated reasoning"), ...rows];
}

function drawQuestion(index) {
  const q = data("q" + index);
  q.core = q.steps.flatMap((step) => step.kept).filter((fact) => fact[3] !== null).map((fact) => [fact[3], fact[4]]);
  currentQuestion = q;
  origin = null;
  const kind = [q.id, q.type, q.hops && plural(q.hops, "hop")].filter(Boolean).join(" · ");
  const parseErrors = Object.entries(q.parse_errors).map(([name, n]) => `${name.replaceAll("_", " ")} × ${n}`).join(", ");
  const back = el("a", "back", "← all questions");
  back.href = "#";
  const reasoning = q.verdict === "unfinished"
    ? [el("p", "soft", "This question is unfinished; run the same command to resume.")]
    : q.error !== null ? [] : [
      el("h2", "", "Steps"), ...q.steps.map((step, i) => drawStep(step, i, q)),
      el("h2", "", "Answering"), ...q.attempts.map(drawAttempt)];
  $("main").replaceChildren(
    back,
    el("div", "place", `${index + 1} of ${questions.length} · `, text(kind)),
    el("h1", "ask text", q.question),
    el("section", "verdict", el("dl", "",
      q.error !== null && [el("dt", "", "Failed"), el("dd", "", text(q.error))],
      q.granularity !== null && [el("dt", "", "Answer"), el("dd", "",
        text(q.answer === "" ? "(empty)" : q.answer, "answer"), " ",
        el("span", "pill " + q.verdict, q.verdict), " ",
        el("span", "pill", q.granularity !== "default" ? "from " + q.granularity + "s"
          : q.attempts.length === 1 && q.attempts[0].granularity === "default" ? "from the reader, without evidence"
            : q.answer === "" ? "not stated in the evidence" : "refused at every granularity"))],
      q.answers.length > 0 && [el("dt", "", "Gold"), el("dd", "", text(q.answers.join("  |  ")))]),
      drawFigures(q),
      parseErrors !== "" && el("div", "small soft", "Parse errors: ", text(parseErrors))),
    ...reasoning, ...drawAnnotation(q));
  drawPassages(q);
  $("main").scrollTop = 0;
}

// ------------------------------------------------------------------------------------ the list

const { questions } = data("index");
const state = { verdict: null, granularity: null, words: [] };
let matching = [];
let current = null;
let haystacks = null;

function search() {
  haystacks ??= questions.map((q) => plain([q.question, q.answer, ...q.answers, q.id].join("\n")));
  state.words = searchWords();
  filter();
}

function filter() {
  matching = [];
  questions.forEach((q, index) => {
    if (state.verdict !== null && q.verdict !== state.verdict) return;
    if (state.granularity !== null && q.granularity !== state.granularity) return;
    if (state.words.every((word) => haystacks[index].includes(word))) matching.push(index);
  });
  $("list").replaceChildren();
  $("list").scrollTop = 0;
  if (matching.length === 0) $("list").append(el("li", "none", "No question matches."));
  else more();
  summarize();
}

function more(least = 0) { // draws the next entries, at least `least` in total
  const from = $("list").childElementCount;
  const to = Math.min(matching.length, Math.max(from + BATCH, least));
  $("list").append(...matching.slice(from, to).map(drawItem));
}

function drawItem(index) {
  const q = questions[index];
  const answer = q.granularity === null ? q.verdict : q.answer || "(empty)";
  const link = el("a", "item", el("span", "q text", q.question),
    el("span", "a", el("span", "dot " + q.verdict), text(answer)));
  link.href = "#" + (index + 1);
  link.dataset.index = index;
  if (index === current) link.setAttribute("aria-current", "true");
  return el("li", "", link);
}

function summarize() {
  const scored = matching.map((index) => questions[index])
    .filter((q) => q.em !== null || (q.verdict === "failed" && q.answers.length > 0)); // failed questions have score 0
  const mean = (key) => scored.reduce((sum, q) => sum + (q[key] ?? 0), 0) / scored.length;
  const figures = scored.every((q) => q.em === null) ? "" : ` · EM ${(100 * mean("em")).toFixed(1)} · F1 ${(100 * mean("f1")).toFixed(1)}`;
  const all = matching.length === questions.length ? "" : ` of ${questions.length.toLocaleString("en")}`;
  $("summary").textContent = `${matching.length.toLocaleString("en")}${all} question${questions.length === 1 ? "" : "s"}${figures}`;
}

function drawChips(holder, key, names) {
  const count = (name) => questions.filter((q) => q[key] === name).length;
  const present = names.filter((name) => count(name) > 0);
  if (present.length < 2) return;
  chips(holder, [[null, "all"], ...present.map((name) => [name, `${name} ${count(name)}`])], (name) => {
    state[key] = name;
    filter();
  });
}

// ---------------------------------------------------------------------------------- navigation

function show(index) {
  current = index;
  drawQuestion(index);
  for (const old of $("list").querySelectorAll("[aria-current]")) old.removeAttribute("aria-current");
  more(matching.indexOf(index) + 1);
  const item = $("list").querySelector(`[data-index="${index}"]`);
  item?.setAttribute("aria-current", "true");
  item?.scrollIntoView({ block: "nearest" });
}

function route() {
  const [, number, fact] = /^#(\d+)(?:\.(\d+))?$/.exec(location.hash) ?? []; // question.fact
  const isQuestion = number >= 1 && number <= questions.length;
  document.body.classList.toggle("reading", isQuestion);
  if (isQuestion) {
    show(number - 1);
    if (matchMedia("(max-width: 760px)").matches) scrollTo(0, 0);
    if (fact) $("main").querySelectorAll(".fact")[fact - 1]?.click();
  } else if (current === null && questions.length > 0) {
    show(0);
  }
}

function move(by) { // through the matching questions
  if (matching.length === 0) return;
  const place = matching.indexOf(current);
  const next = place < 0 ? 0 : Math.min(matching.length - 1, Math.max(0, place + by));
  location.hash = "#" + (matching[next] + 1);
}

function moveFact(by) { // through the core facts of the question, showing their sources
  const facts = [...$("main").querySelectorAll(".fact")];
  if (facts.length === 0) return;
  const place = facts.indexOf(origin);
  const next = place < 0 ? (by > 0 ? 0 : facts.length - 1) : (place + by + facts.length) % facts.length;
  facts[next].scrollIntoView({ block: "nearest" });
  facts[next].focus({ preventScroll: true });
  facts[next].click();
}

const KEYS = {
  j: () => move(1), k: () => move(-1), n: () => moveFact(1), p: () => moveFact(-1),
  Escape: goBack,
};

listen(KEYS, search, () => { if (!matching.includes(current)) move(0); });
$("list").addEventListener("scroll", () => {
  const list = $("list");
  if (list.scrollTop + 2 * list.clientHeight > list.scrollHeight && list.childElementCount < matching.length) more();
});
addEventListener("hashchange", route);
drawChips($("verdicts"), "verdict", VERDICTS);
drawChips($("granularities"), "granularity", GRANULARITIES);
search();
route();
