// The result page's list of questions: one row per question, one column per run.

const BATCH = 100; // rows drawn at a time
const MARKS = { right: "✓", wrong: "✗", unscored: "·", failed: "!" };
const { runs, questions } = data("index");
const rights = (q) => q.runs.filter(([verdict]) => verdict === "right").length;
const AGREEMENT = {
  all: () => true,
  "runs differ": (q) => rights(q) > 0 && rights(q) < runs.length,
  "all right": (q) => rights(q) === runs.length,
  "none right": (q) => rights(q) === 0 && q.answers.length > 0,
};
const state = { agreement: "all", words: [], verdicts: runs.map(() => "") };
let matching = [];
let haystacks = null;

function search() {
  haystacks ??= questions.map((q) => plain(
    [q.question, q.id, q.type ?? "", ...q.answers, ...q.runs.map(([, answer]) => answer)].join("\n")));
  state.words = searchWords();
  filter();
}

function filter() {
  matching = questions.filter((q, index) => AGREEMENT[state.agreement](q)
    && state.verdicts.every((verdict, run) => verdict === "" || q.runs[run][0] === verdict)
    && state.words.every((word) => haystacks[index].includes(word)));
  $("answers").tBodies[0].replaceChildren();
  more();
  const all = matching.length === questions.length ? "" : ` of ${questions.length.toLocaleString("en")}`;
  $("summary").textContent = `${matching.length.toLocaleString("en")}${all} question${questions.length === 1 ? "" : "s"}`;
  document.querySelectorAll("#answers .share").forEach((node, run) => {
    const scored = matching.filter((q) => q.answers.length > 0 && q.runs[run][0] !== "unscored");
    const right = scored.filter((q) => q.runs[run][0] === "right").length;
    node.textContent = scored.length === 0 ? "" : `${(100 * right / scored.length).toFixed(1)} % right`;
  });
}

function more() { // draws the next rows
  const body = $("answers").tBodies[0];
  const from = body.childElementCount;
  body.append(...matching.slice(from, from + BATCH).map(drawRow));
}

function drawRow(q) {
  const kind = [q.type, q.hops && plural(q.hops, "hop"), q.id].filter(Boolean).join(" · ");
  return el("tr", "",
    el("td", "", text(q.question),
      el("div", "small soft", q.answers.length > 0 && ["Gold: ", el("b", "", text(q.answers.join("  |  "))), " · "], text(kind))),
    q.runs.map(([verdict, answer, place], run) => {
      const link = el("a", "said", el("span", "mark " + verdict, MARKS[verdict]),
        text(verdict === "failed" ? "failed" : answer === "" ? "(empty)" : answer));
      link.href = `${runs[run].page}#${place}`;
      link.target = runs[run].page; // one tab per run, so that its trace is loaded once
      link.title = verdict;
      return el("td", "", link);
    }));
}

function drawHead() {
  const columns = runs.map(({ name }, run) => {
    const present = Object.keys(MARKS).filter((verdict) => questions.some((q) => q.runs[run][0] === verdict));
    const choice = el("select", "", ["", ...present].map((verdict) => {
      const count = questions.filter((q) => q.runs[run][0] === verdict).length;
      const option = el("option", "", verdict === "" ? "any" : `${verdict} ${count}`);
      option.value = verdict;
      return option;
    }));
    choice.setAttribute("aria-label", visible(`Verdict of ${name}`));
    choice.addEventListener("change", () => { state.verdicts[run] = choice.value; filter(); });
    return el("th", "", text(name), el("span", "share soft"), choice);
  });
  $("answers").tHead.append(el("tr", "", el("th", "", "question"), columns));
}

const labels = Object.entries(AGREEMENT).map(([name, holds]) => [name, questions.filter(holds).length]);
chips($("agreement"), labels.filter(([, count]) => count > 0).map(([name, count]) => [name, `${name} ${count}`]),
  (name) => { state.agreement = name; filter(); });
drawHead();
listen({}, search, () => {});
addEventListener("scroll", () => {
  const { scrollHeight } = document.documentElement;
  if (scrollY + 2 * innerHeight > scrollHeight && $("answers").tBodies[0].childElementCount < matching.length) more();
});
search();
