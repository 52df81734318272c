"use strict";
// Helpers that draw a page from its data blocks. Untrusted text (questions, passages, model output)
// becomes only text nodes, never markup, attributes or links.

const $ = (id) => document.getElementById(id);

// Characters that hide or reorder text, and halves of surrogate pairs, are escaped.
const INVISIBLE = /[\p{Cc}\p{Cs}\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;
const visible = (value) => String(value ?? "").replace(/\r\n/g, "\n").replace(INVISIBLE,
  (c) => c === "\n" || c === "\t" ? c : "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));

function el(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return node;
}
const text = (value, className = "") => el("span", ("text " + className).trim(), value);
const data = (name) => JSON.parse($(name).textContent);
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
const cut = (value, length = 60) => value.length > length ? value.slice(0, length - 1) + "…" : value;

function button(className, onClick, ...children) {
  const node = el("button", className, ...children);
  node.type = "button";
  node.addEventListener("click", () => onClick(node));
  return node;
}

const plain = (value) => value.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
const searchWords = () => plain($("search").value).split(/\s+/).filter(Boolean);

function chips(holder, labels, choose) { // buttons that choose one of several [value, label]
  holder.append(...labels.map(([value, label], index) => {
    const chip = button("", () => {
      for (const other of holder.children) other.setAttribute("aria-pressed", String(other === chip));
      choose(value);
    }, label);
    chip.setAttribute("aria-pressed", String(index === 0));
    return chip;
  }));
}

function toggleTheme() {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
}

function listen(pageKeys, search, enter) { // to the keyboard and the search field
  const toSearch = () => { $("search").focus(); $("search").select(); };
  const keys = { d: toggleTheme, "/": toSearch, ...pageKeys };
  $("search").addEventListener("input", search);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === $("search")) {
      if (event.key === "Escape") { $("search").value = ""; search(); $("search").blur(); }
      if (event.key === "Enter") { $("search").blur(); enter(); }
      return;
    }
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
}

const media = matchMedia("(prefers-color-scheme: dark)");
const followSystem = () => { document.documentElement.dataset.theme = media.matches ? "dark" : "light"; };
media.addEventListener("change", followSystem);
followSystem();
$("theme").addEventListener("click", toggleTheme);

