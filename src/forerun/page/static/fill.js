// Fill: a text with holes. The text holds markers; the picture below it lets one click and drag.
import { el, labelled, number } from './dom.js';
import { MethodChoice, numberField } from './form.js';
import { Player } from './player.js';
import { Work, emptyReplay } from './stream.js';

const MARKER = /(\\*)<\|fill:(\d{1,3})(?:-(\d{1,3}))?\|>/g;
const LONGEST_HOLE = 64;
const PIXELS_PER_TOKEN = 8;
const CHARACTERS_PER_TOKEN = 3;
const EXAMPLES = {
  'Python code': 'def mean(values):\n    total = <|fill:8|>\n    return total / len(values)\n',
  English: 'The <|fill:4-6|> is a small river. It flows into the sea.',
};

export function fill(panel, site) {
  const choice = new MethodChoice(site, { filter: (model) => model.infills !== false, method: 'assd', model: preferred(site) });
  const text = el('textarea', { value: EXAMPLES['Python code'], spellcheck: 'false', oninput: () => draw() });
  const picture = el('div', { class: 'preview', role: 'group', 'aria-label': 'Text with its holes' });
  const holes = el('div', { class: 'fields' });
  const count = numberField('Alternatives', 3, { min: 1, max: 16 });
  const temperature = numberField('Temperature', 0.8, { step: 'any' });
  const seed = numberField('Seed', 0);
  const start = el('button', { type: 'submit', class: 'main' }, 'Fill');
  const stop = el('button', { type: 'button' }, 'Stop');
  const make = el('button', { type: 'button', onclick: () => makeHole(text.selectionStart, text.selectionEnd) }, 'Make a hole at the cursor');
  const examples = Object.entries(EXAMPLES).map(([name, example]) => el('button', { type: 'button', onclick: () => { text.value = example; draw(); } }, name));
  const alternatives = el('ol', { class: 'alternatives', 'aria-label': 'Alternatives, likeliest first' });
  const place = el('div', {});
  const work = new Work(start, stop, site.fail);

  function makeHole(from, to) {
    const size = Math.max(1, Math.ceil((to - from) / CHARACTERS_PER_TOKEN)) || 1;
    const length = from === to ? 6 : size;
    text.value = `${text.value.slice(0, from)}<|fill:${length}|>${text.value.slice(to)}`;
    draw();
  }

  function resize(hole, least, most) {
    const bounded = (value) => Math.max(1, Math.min(LONGEST_HOLE, Math.round(value) || 1));
    const low = bounded(least);
    const high = Math.max(low, bounded(most));
    const marker = low === high ? `<|fill:${low}|>` : `<|fill:${low}-${high}|>`;
    text.value = text.value.slice(0, hole.from) + marker + text.value.slice(hole.to);
    draw();
  }

  function draw(focused = document.activeElement?.dataset?.hole) {
    const { parts, found } = parse(text.value);
    picture.replaceChildren(...parts.map((part) => (part.hole ? slider(part.hole, resize) : words(part, makeHole))));
    holes.replaceChildren(...found.map((hole) => sizes(hole, resize, () => { text.value = text.value.slice(0, hole.from) + text.value.slice(hole.to); draw(); })));
    if (focused !== undefined) picture.querySelector(`[data-hole="${focused}"]`)?.focus();
  }

  function accept(alternative) {
    text.value = whole(alternative);
    alternatives.replaceChildren();
    draw();
    text.focus();
  }

  function offer(found) {
    alternatives.replaceChildren(...found.map((one) => {
      const tokens = one.lengths.reduce((sum, length) => sum + length, 0);
      const density = one.logprob == null ? 'not finished' : `joint log-probability ${number(one.logprob)}, ${number(one.logprob / Math.max(1, tokens))} per token`;
      return el('li', {}, el('pre', { tabindex: '0' }, one.given.flatMap((piece, i) => [piece, i < one.fills.length ? el('mark', {}, one.fills[i]) : null])),
        el('p', { class: 'quiet' }, density), el('button', { type: 'button', onclick: () => accept(one) }, 'Accept'));
    }));
  }

  async function run(event) {
    event.preventDefault();
    site.fail(null);
    alternatives.replaceChildren();
    const lines = new Map();
    const first = new Player({ live: true, ask: emptyReplay });
    place.replaceChildren(first.root);
    let found = null;
    const request = { ...choice.request(), text: text.value, temperature: temperature.value, seed: seed.value, n: temperature.value > 0 ? count.value : 1 };
    const took = (line) => {
      if (line.kind === 'fills') found = line.alternatives;
      else {
        if (!lines.has(line.request)) lines.set(line.request, []);
        lines.get(line.request).push(line);
        if (line.request === 0) first.push(line);
      }
    };
    await work.run('/page/run', { runs: [request] }, took);
    first.finish();
    if (found) {
      found.sort((a, b) => perToken(b) - perToken(a));
      offer(found);
      if (found[0].request !== 0) place.replaceChildren(replayOf(lines.get(found[0].request)).root);
      again.disabled = false;
    }
  }

  const again = el('button', { type: 'button', disabled: true, onclick: (event) => { seed.box.value = seed.value + 1; run(event); } }, 'Try again');
  panel.append(el('h2', {}, 'Fill the holes of a text'),
    el('form', { class: 'ask', onsubmit: run },
      el('div', { class: 'fields' }, el('span', {}, 'Examples:'), examples, make),
      labelled('Text; a hole is <|fill:8|>, or <|fill:4-12|> for any length between', text),
      el('p', { class: 'quiet' }, 'Click a word to make it a hole. Drag a hole, or press its arrow keys, to change its length.'),
      picture, holes,
      el('div', { class: 'fields' }, choice.fields, count.field, temperature.field, seed.field, start, stop, again),
      choice.summary, choice.optionsBox), alternatives, place);
  draw(undefined);
}

function preferred(site) {
  return site.about.models.find((one) => one.family === 'any-subset')?.name ?? null;
}

function perToken(one) {
  const tokens = one.lengths.reduce((sum, length) => sum + length, 0);
  return one.logprob == null ? -Infinity : one.logprob / Math.max(1, tokens);
}

function whole({ given, fills }) {
  return given.map((piece, i) => piece + (fills[i] ?? '')).join('');
}

function replayOf(lines) {
  const player = new Player({ ask: emptyReplay });
  for (const line of lines) player.push({ ...line, request: 0 });
  return player.finish();
}

// The text between markers, and the holes that they are. A backslash makes a marker plain text.
function parse(source) {
  const parts = [];
  const found = [];
  let end = 0;
  for (const match of source.matchAll(MARKER)) {
    if (match[1].length % 2) continue;
    const from = match.index + match[1].length;
    const hole = { index: found.length, from, to: match.index + match[0].length, least: Number(match[2]), most: Number(match[3] ?? match[2]) };
    parts.push({ text: source.slice(end, from), at: end }, { hole });
    found.push(hole);
    end = hole.to;
  }
  parts.push({ text: source.slice(end), at: end });
  return { parts, found };
}

function words({ text, at }, makeHole) {
  let from = at;
  return el('span', {}, text.split(/(\s+)/).map((word) => {
    const [begin, end] = [from, from + word.length];
    from = end;
    if (!word.trim()) return word;
    return el('span', { class: 'word', onclick: () => makeHole(begin, end) }, word);
  }));
}

function slider(hole, resize) {
  const label = hole.least === hole.most ? `${hole.least}` : `${hole.least}–${hole.most}`;
  const node = el('span', { class: 'hole', role: 'slider', tabindex: '0', 'data-hole': hole.index,
    'aria-label': `Length of hole ${hole.index + 1}`, 'aria-valuemin': 1, 'aria-valuemax': LONGEST_HOLE,
    'aria-valuenow': hole.most, 'aria-valuetext': `${label} tokens` }, label);
  node.style.width = `${Math.max(5, hole.most) * PIXELS_PER_TOKEN}px`;
  const grow = (by) => resize(hole, hole.least + by, hole.most + by);
  node.addEventListener('keydown', (event) => {
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 8, PageDown: -8 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    grow(by);
  });
  node.addEventListener('pointerdown', (event) => {
    const began = event.clientX;
    const width = node.offsetWidth;
    const tokens = (now) => Math.round((now - began) / PIXELS_PER_TOKEN);
    const move = (moved) => { node.style.width = `${Math.max(PIXELS_PER_TOKEN, width + moved.clientX - began)}px`; };
    const drop = (dropped) => {
      window.removeEventListener('pointermove', move);
      const by = tokens(dropped.clientX);
      if (by) grow(by);
    };
    window.addEventListener('pointermove', move);
    window.addEventListener('pointerup', drop, { once: true });
    event.preventDefault();
    node.focus();
  });
  return node;
}

function sizes(hole, resize, remove) {
  const least = numberField(`Hole ${hole.index + 1}, from`, hole.least, { min: 1, max: LONGEST_HOLE });
  const most = numberField('to', hole.most, { min: 1, max: LONGEST_HOLE });
  const change = () => resize(hole, least.value, Math.max(least.value, most.value));
  least.box.addEventListener('change', change);
  most.box.addEventListener('change', change);
  return el('div', { class: 'fields' }, least.field, most.field,
    el('button', { type: 'button', 'aria-label': `Remove hole ${hole.index + 1}`, onclick: remove }, '×'));
}
