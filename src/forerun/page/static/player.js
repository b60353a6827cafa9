// Plays one or several runs: forwards and backwards, at their true pace or slowed.
import { download, el, labelled, number, percent, short } from './dom.js';
import { Run } from './trace.js';
import { Card, TokenView, meaning, slug } from './tokens.js';

const SPEEDS = [['true pace', 1], ['1/2', 0.5], ['1/5', 0.2], ['1/20', 0.05], ['1/100', 0.01]];
const ITERATES = new Set(['jacobi', 'multiblock', 'lookahead']);
const ROWS_SHOWN = 16;
const COLUMNS_SHOWN = 64;
const SPEAK_EVERY = 3000; // milliseconds
const ORDINALS = ['1st', '2nd', '3rd', '4th'];

export class Player {
  constructor({ live = false, ask = null, closed = false } = {}) {
    this.live = live;
    this.ask = ask; // fetches an empty replay; without it no HTML can be saved
    this.closed = closed; // are the iterates folded away at first?
    this.panels = [];
    this.timeline = []; // [panel, step] in the order of arrival
    this.lines = [];
    this.cursor = 0; // steps shown
    this.clock = 0;
    this.speed = 1;
    this.playing = live;
    this.follows = live; // at the head of a live run
    this.spoke = 0;
    this.build();
  }

  build() {
    const button = (label, sign, act) => el('button', { type: 'button', 'aria-label': label, title: label, onclick: act }, sign);
    this.playButton = button('Play', '▶', () => this.toggle());
    this.scrubber = el('input', { type: 'range', min: 0, max: 0, value: 0, step: 1, 'aria-label': 'Step',
      oninput: () => { this.stop(); this.seek(Number(this.scrubber.value)); } });
    this.where = el('output', { class: 'where' });
    this.speedChoice = el('select', { onchange: () => { this.speed = Number(this.speedChoice.value); this.follows = this.live && this.speed === 1; } },
      SPEEDS.map(([name, value]) => el('option', { value }, name)));
    this.saveHtml = button('Save as one HTML file that plays anywhere', 'HTML', () => this.save());
    this.saveHtml.hidden = !this.ask;
    this.bar = el('div', { class: 'controls', role: 'group', 'aria-label': 'Player' },
      button('To the start', '|◀', () => { this.stop(); this.seek(0); }),
      button('One forward back', '◀', () => this.byForward(-1)),
      this.playButton,
      button('One forward on', '▷', () => this.byForward(1)),
      button('To the end', '▶|', () => { this.stop(); this.seek(this.timeline.length); }),
      this.scrubber, this.where, labelled('Speed', this.speedChoice),
      el('span', { class: 'save' },
        button('Save the trace as a file', 'Trace', () => download('trace.jsonl', this.jsonLines(), 'application/jsonl')),
        this.saveHtml));
    this.spoken = el('p', { class: 'unseen', 'aria-live': 'polite' });
    this.body = el('div', { class: 'panels' });
    this.legend = el('ul', { class: 'legend', 'aria-label': 'Colours' });
    this.notes = el('div', { class: 'notes' });
    this.root = el('section', { class: 'player', 'aria-label': 'Decoding', 'aria-busy': String(this.live) }, this.bar, this.body, this.legend, this.notes, this.spoken);
  }

  // A line has arrived.
  push(line) {
    const request = line.request ?? 0;
    this.lines.push(line);
    const panel = this.panelOf(request);
    if (panel.run.push(line)) {
      this.timeline.push([panel, panel.run.steps.length - 1]);
      this.changed = true;
    }
    if (!this.frame) this.frame = requestAnimationFrame((now) => this.tick(now));
  }

  panelOf(request) {
    let panel = this.panels.find((one) => one.run.request === request);
    if (!panel) {
      panel = new Panel(new Run(request), this.closed);
      this.panels.push(panel);
      this.body.append(panel.root);
      this.body.classList.toggle('several', this.panels.length > 1);
    }
    return panel;
  }

  // Nothing more will come.
  finish() {
    this.live = false;
    this.ended = true;
    if (this.follows) this.seek(this.timeline.length);
    this.follows = false;
    if (this.cursor >= this.timeline.length) this.stop();
    this.root.setAttribute('aria-busy', 'false');
    this.refresh();
    return this;
  }

  tick(now) {
    this.frame = null;
    const passed = Math.min(now - (this.last ?? now), 250) / 1000;
    this.last = now;
    if (this.follows) this.seek(this.timeline.length);
    else if (this.playing) this.advance(passed * this.speed);
    else if (this.changed) this.refresh();
    this.changed = false;
    if (this.playing && !this.follows) this.frame = requestAnimationFrame((then) => this.tick(then));
    else this.last = undefined;
  }

  advance(seconds) {
    this.clock += seconds;
    let to = this.cursor;
    while (to < this.timeline.length && this.timeAt(to) <= this.clock) to += 1;
    if (to !== this.cursor) this.seek(to, true);
    if (to >= this.timeline.length && !this.live) this.stop();
    else if (to >= this.timeline.length) this.clock = this.timeAt(to - 1);
  }

  timeAt(index) {
    const entry = this.timeline[Math.min(index, this.timeline.length - 1)];
    return entry ? entry[0].run.steps[entry[1]].totals.time : 0;
  }

  toggle() {
    if (this.playing) return this.stop();
    if (this.cursor >= this.timeline.length && !this.live) this.seek(0);
    this.playing = true;
    this.clock = this.cursor ? this.timeAt(this.cursor - 1) : 0;
    this.follows = this.live && this.speed === 1;
    this.showPlaying();
    this.frame ??= requestAnimationFrame((now) => this.tick(now));
  }

  stop() {
    this.playing = false;
    this.follows = false;
    this.showPlaying();
  }

  showPlaying() {
    const label = this.playing ? 'Pause' : 'Play';
    this.playButton.textContent = this.playing ? '❚❚' : '▶';
    this.playButton.setAttribute('aria-label', label);
    this.playButton.title = label;
  }

  byForward(way) {
    this.stop();
    const forwardAt = (index) => this.timeline[index - 1]?.[0].run.steps[this.timeline[index - 1][1]].totals.forward ?? 0;
    const now = forwardAt(this.cursor);
    let to = this.cursor;
    if (way > 0) {
      while (to < this.timeline.length && forwardAt(to + 1) <= now) to += 1;
      while (to < this.timeline.length && forwardAt(to + 1) <= now + 1) to += 1;
    } else {
      while (to > 0 && forwardAt(to) >= now) to -= 1;
    }
    this.seek(to);
  }

  // Show the first `to` steps.
  seek(to, keepsClock = false) {
    const goal = Math.max(0, Math.min(to, this.timeline.length));
    for (; this.cursor < goal; this.cursor += 1) {
      const [panel, step] = this.timeline[this.cursor];
      panel.forwards(step);
    }
    for (; this.cursor > goal; this.cursor -= 1) {
      const [panel, step] = this.timeline[this.cursor - 1];
      panel.backwards(step);
    }
    if (!keepsClock) this.clock = this.cursor ? this.timeAt(this.cursor - 1) : 0;
    this.refresh();
  }

  refresh() {
    for (const panel of this.panels) panel.refresh(this.playing);
    this.scrubber.max = this.timeline.length;
    this.scrubber.value = this.cursor;
    const words = `step ${this.cursor} of ${this.timeline.length}`;
    this.where.textContent = words;
    this.scrubber.setAttribute('aria-valuetext', words);
    this.showLegend();
    if (this.panels.length > 1 && this.ended) this.showFinish();
    this.speak();
  }

  showLegend() {
    const reasons = new Set(this.panels.flatMap(({ run }) => Object.keys(run.totals.reasons)));
    const rejected = this.panels.some((panel) => panel.run.totals.rejected);
    const key = [...reasons].join() + rejected;
    if (this.legendKey === key) return;
    this.legendKey = key;
    const items = [...reasons].map((reason) => el('li', {}, el('span', { class: `token r-${slug(reason)}` }, short(reason)), ` ${meaning(reason)}`));
    if (rejected) items.push(el('li', {}, el('s', { class: 'struck' }, 'rejected'), ' drafted, and rejected'));
    this.legend.replaceChildren(...items);
  }

  speak() {
    const now = performance.now();
    if (this.playing && now - this.spoke < SPEAK_EVERY) return;
    this.spoke = now;
    this.spoken.textContent = this.panels.map((panel) => panel.summary()).join('; ');
  }

  // Who arrived when, and whether the texts are the same.
  showFinish() {
    const panels = this.panels;
    const order = [...panels].sort((a, b) => a.seconds - b.seconds);
    order.forEach((panel, i) => { panel.place.textContent = panel.run.end?.error ? 'failed' : `${ORDINALS[i] ?? `${i + 1}th`}, ${number(panel.seconds)} s`; });
    this.notes.replaceChildren(differences(panels.map((panel) => panel.run)));
  }

  jsonLines() {
    return `${this.lines.map((line) => JSON.stringify(line)).join('\n')}\n`;
  }

  async save() {
    const empty = await this.ask();
    const data = this.lines.map((line) => JSON.stringify(line).replaceAll('<', '\\u003c')).join('\n');
    const mark = '<script type="application/jsonl" id="trace">';
    download('replay.html', empty.replace(mark, () => mark + data), 'text/html');
  }
}

// One run: its canvas, its counters, its iterates and its routers' decisions.
class Panel {
  constructor(run, closed) {
    this.run = run;
    this.closed = closed;
    this.shown = 0; // steps
    this.dirty = new Map();
    this.card = new Card();
    this.view = new TokenView(run, (...what) => this.card.show(...what));
    this.heading = el('h3', {});
    this.promise = el('p', { class: 'promise' });
    this.place = el('p', { class: 'place' });
    this.track = el('progress', { max: 1, value: 0, 'aria-label': 'Tokens decided' });
    this.counters = counters();
    this.iterates = el('table', { class: 'iterates' });
    this.iteratesBox = el('details', { hidden: true }, el('summary', {}, 'Iterates of the block'),
      el('div', { class: 'wide', tabindex: '0', role: 'group', 'aria-label': 'Iterates' }, this.iterates));
    this.margin = el('ol', { class: 'margin', 'aria-label': 'Decisions of the router' });
    this.text = el('pre', { tabindex: '0', 'aria-label': 'Text' });
    this.textBox = el('details', { ontoggle: () => this.showText() }, el('summary', {}, 'Plain text'), this.text);
    this.root = el('article', { class: 'panel' }, el('header', {}, this.heading, this.promise, this.place, this.track),
      el('div', { class: 'canvas' }, this.view.box, this.margin, this.card.box),
      this.counters.box, this.iteratesBox, this.textBox);
  }

  get seconds() {
    return this.run.end?.stats?.seconds ?? this.run.totals.time;
  }

  forwards(step) {
    for (const [position, , after] of this.run.steps[step].changes) this.dirty.set(position, after);
    this.shown = step + 1;
  }

  backwards(step) {
    const { changes } = this.run.steps[step];
    for (let i = changes.length - 1; i >= 0; i -= 1) this.dirty.set(changes[i][0], changes[i][1]);
    this.shown = step;
  }

  get totals() {
    return this.shown ? this.run.steps[this.shown - 1].totals : { forward: 0, drafts: 0, tokens: 0, drafted: 0, accepted: 0, time: 0, reasons: {} };
  }

  refresh(playing) {
    this.introduce();
    if (this.dirty.size) {
      const last = this.view.paint(this.dirty);
      this.dirty.clear();
      if (playing && last) keepInSight(this.view.box, last);
    }
    const ended = this.run.end && this.shown === this.run.steps.length;
    this.counters.show(this.totals, ended ? this.run.end.stats : null);
    const room = this.run.start ? this.run.start.tokens.filter((token) => token === null).length : 0;
    const most = this.run.end ? Math.max(1, this.run.totals.tokens) : Math.max(1, room);
    this.track.max = most;
    this.track.value = Math.min(most, this.totals.tokens);
    this.showIterates();
    this.showRoutes();
    if (this.textBox.open) this.showText();
  }

  introduce() {
    const { start, end } = this.run;
    const words = start ? `${start.method} on ${start.model}` : 'trace';
    if (this.heading.textContent !== words) this.heading.textContent = words;
    let promise = start ? `${start.guarantee}; reference: ${start.reference}` : '';
    if (end?.error) promise = `failed: ${end.error}`;
    else if (end?.finish_reason === 'cancelled') promise += '; stopped';
    if (this.promise.textContent !== promise) this.promise.textContent = promise;
  }

  showText() {
    this.text.textContent = this.run.text.slice(0, 1_000_000);
  }

  showIterates() {
    const wanted = ITERATES.has(this.run.method) && this.run.rows.length > 0;
    if (this.iteratesBox.hidden === wanted) {
      this.iteratesBox.hidden = !wanted;
      this.iteratesBox.open = wanted && !this.closed;
    }
    if (!wanted || !this.iteratesBox.open) return;
    const seen = lastBefore(this.run.rows, this.shown, ROWS_SHOWN);
    const key = `${seen[0]?.step}-${seen.at(-1)?.step}-${this.run.steps.length === this.shown}`;
    if (key === this.iteratesKey) return;
    this.iteratesKey = key;
    this.iterates.replaceChildren(...iterateRows(this.run, seen));
  }

  showRoutes() {
    if (!this.run.routes.length) return;
    const seen = lastBefore(this.run.routes, this.shown, 12);
    const key = `${seen.length}-${seen.at(-1)?.step}`;
    if (key === this.routesKey) return;
    this.routesKey = key;
    this.margin.replaceChildren(...seen.map(({ line }) => el('li', { class: line.verify ? 'verify' : 'trust' },
      el('b', {}, line.verify ? 'verify' : 'trust'),
      ` forward ${line.forward}: run of ${line.run}, ${number(line.expected, 1)} expected, ${line.confident} sure`)));
  }

  summary() {
    const { tokens, forward } = this.totals;
    return `${this.heading.textContent}: ${tokens} tokens in ${forward} forwards`;
  }
}

function keepInSight(box, node) {
  const bottom = node.offsetTop - box.offsetTop + node.offsetHeight;
  if (bottom > box.scrollTop + box.clientHeight || bottom < box.scrollTop) box.scrollTop = bottom - box.clientHeight / 2;
}

// The last few entries that were recorded before a step.
function lastBefore(entries, step, most) {
  let low = 0;
  let high = entries.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (entries[middle].step < step) low = middle + 1;
    else high = middle;
  }
  return entries.slice(Math.max(0, low - most), low);
}

// Each row is what was guessed before a forward. A guess that stays is right for good.
function iterateRows(run, seen) {
  if (!seen.length) return [];
  const first = Math.min(...seen.map(({ line }) => line.positions[0]));
  const last = Math.max(...seen.map(({ line }) => line.positions[0] + line.chain.length - 1));
  const width = Math.min(last - first + 1, COLUMNS_SHOWN);
  const head = el('tr', {}, el('th', { scope: 'col' }, 'forward'),
    Array.from({ length: width }, (_, i) => el('th', { scope: 'col' }, first + i)));
  const rows = seen.map(({ line }) => {
    const cells = Array.from({ length: width }, (_, i) => {
      const at = first + i - line.positions[0];
      if (at < 0 || at >= line.chain.length) return el('td', {});
      const final = run.cell(first + i);
      const right = final.kind === 'token' && final.token === line.chain[at];
      const stays = line.tokens[at] === line.chain[at];
      const text = short(line.chain_texts?.[at] ?? String(line.chain[at]), 12);
      return el('td', { class: right ? 'right' : stays ? 'stays' : 'moves', title: right ? 'right' : stays ? 'unchanged' : 'will change' }, text);
    });
    return el('tr', {}, el('th', { scope: 'row' }, line.forward), cells);
  });
  return [el('caption', {}, 'One row per forward: the guesses that went in. Green: what will stand there.'),
    el('thead', {}, head), el('tbody', {}, rows)];
}

function counters() {
  const names = ['tokens', 'forwards', 'tokens per forward', 'tokens/s', 'acceptance', 'forwards saved'];
  const values = names.map(() => el('dd', {}, '–'));
  const box = el('dl', { class: 'counters' }, names.map((name, i) => el('div', {}, el('dt', {}, name), values[i])));
  const show = (totals, stats) => {
    const { tokens, forward, drafts, drafted, accepted, time } = totals;
    const rate = stats ? stats.tokens_per_second : time ? tokens / time : null;
    const shown = [tokens, drafts ? `${forward} + ${drafts} drafting` : forward,
      forward ? number(tokens / forward) : '–', number(rate, 0),
      drafted ? percent(accepted / drafted) : '–', tokens ? tokens - forward : '–'];
    shown.forEach((value, i) => { if (values[i].textContent !== String(value)) values[i].textContent = value; });
  };
  return { box, show };
}

// What the texts of several runs share, each beside the first.
function differences(runs) {
  const [first, ...others] = runs;
  const ids = (run) => run.tokens.map((cell) => cell.token);
  const rows = others.map((run) => {
    const [a, b] = [ids(first), ids(run)];
    const exact = run.start?.guarantee === 'exact' && first.start?.reference === run.start?.reference;
    if (a.join() === b.join()) return el('li', { class: 'same' }, el('b', {}, `${run.method}: identical`), ` to ${first.method}, all ${a.length} tokens`);
    let at = 0;
    while (at < a.length && a[at] === b[at]) at += 1;
    const texts = (cells) => visibleTail(cells.slice(at, at + 24));
    const why = exact ? 'both are exact, but samples of one law may differ above temperature 0' : 'not the same law, or not the same model';
    return el('li', { class: 'differs' }, el('b', {}, `${run.method}: differs`), ` from ${first.method} after ${at} tokens (${why})`,
      el('p', {}, el('del', {}, texts(first.tokens)), ' ', el('ins', {}, texts(run.tokens))));
  });
  return el('div', {}, el('h3', {}, 'The texts'), el('ul', { class: 'differences' }, rows));
}

function visibleTail(cells) {
  return short(cells.map((cell) => cell.text).join(''), 160);
}
