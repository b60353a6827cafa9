// Elements from plain values. Text only ever becomes text nodes, so no token can become markup.

const PROPERTIES = new Set(['value', 'checked', 'disabled', 'hidden', 'selected', 'open']);
const LONGEST_SHOWN = 400; // characters of one token, or of a title
const UNUSUAL = /[^ -~]/; // most tokens are plain
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]/gu;

export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS('http://www.w3.org/2000/svg', tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value == null || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) node[name] = value;
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.flat(3).filter((child) => child != null && child !== false));
  return node;
}

// What can be shown of a token: its line breaks and controls are visible, its length is bounded.
export function visible(text) {
  if (text.length <= LONGEST_SHOWN && !UNUSUAL.test(text)) return text;
  let shown = text;
  if (shown.length > LONGEST_SHOWN) {
    const cut = shown.slice(0, LONGEST_SHOWN);
    shown = `${cut}… (${text.length.toLocaleString('en')} characters)`;
  }
  return shown
    .replace(CONTROLS, (each) => `\\u${each.codePointAt(0).toString(16).padStart(4, '0')}`)
    .replaceAll('\t', '⇥\t')
    .replaceAll('\n', '↵\n');
}

// The same on one line, for titles and tables.
export function short(text, most = 40) {
  const line = visible(text.slice(0, most)).replaceAll('\n', '').replaceAll('\t', '');
  return text.length > most ? `${line}…` : line;
}

export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el('a', { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

export function labelled(label, control, hint) {
  const id = `f${(labelled.count = (labelled.count ?? 0) + 1)}`;
  control.id = id;
  if (hint) control.title = hint;
  return el('div', { class: 'field' }, el('label', { for: id }, label), control);
}

export function number(value, digits = 2) {
  return value == null || !Number.isFinite(value) ? '–' : value.toFixed(digits);
}

export function percent(value, digits = 0) {
  return value == null ? '–' : `${(100 * value).toFixed(digits)} %`;
}
