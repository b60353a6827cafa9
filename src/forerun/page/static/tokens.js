// The canvas of one run: a node for every position, repainted only where something changed.
import { el, number, percent, short, visible } from './dom.js';

const HIDDEN = { kind: 'blank' };
const REASONS = {
  sampled: 'drawn from the model’s own law, one forward for one token',
  accepted: 'drafted, and accepted by the model',
  bonus: 'the whole draft was accepted: one token more, from the same forward',
  resampled: 'a draft was rejected here: drawn from what is left of the law',
  first: 'the first token of a draft: drawn from its own conditional, so it is certain',
  decided: 'confident enough to be decided',
  revealed: 'revealed by the schedule',
  edited: 'changed after it was decided',
  recycled: 'a run that was rejected before, judged again and accepted',
  ahead: 'of a block ahead: it was already right when its turn came',
};

export class TokenView {
  constructor(run, onInspect) {
    this.run = run;
    this.cells = [];
    this.nodes = [];
    this.active = -1;
    this.onInspect = onInspect;
    this.box = el('div', {
      class: 'tokens', role: 'listbox', tabindex: '0',
      'aria-label': `Tokens of ${run.method}. Arrow keys move from token to token.`,
      onkeydown: (event) => this.onKey(event),
      onpointerover: (event) => this.inspect(event.target.closest('[data-at]')),
      onclick: (event) => this.inspect(event.target.closest('[data-at]')),
      onfocus: () => this.active >= 0 && this.inspect(this.nodes[this.active]),
      onblur: () => this.onInspect(null),
      onpointerleave: () => this.onInspect(null),
    });
  }

  paint(changed) {
    let last = null;
    for (const [position, cell] of changed) {
      const node = this.node(position);
      if (this.cells[position] === cell) continue;
      this.cells[position] = cell;
      this.paintOne(node, cell);
      if (cell.kind !== 'blank' && cell.kind !== 'given') last = node;
    }
    return last;
  }

  node(position) {
    while (this.nodes.length <= position) {
      const at = this.nodes.length;
      const node = el('span', { role: 'option', id: `t${this.id()}-${at}`, 'data-at': at });
      node.hidden = true;
      this.nodes.push(node);
      this.box.append(node);
    }
    return this.nodes[position];
  }

  id() {
    this.number ??= TokenView.count = (TokenView.count ?? 0) + 1;
    return this.number;
  }

  paintOne(node, cell) {
    const blank = cell.kind === 'blank';
    const asked = blank && cell.said !== undefined;
    node.hidden = blank && !asked && !this.run.showsBlanks;
    node.className = cell.kind === 'token' ? classOf(cell.reason) : asked ? 'asked' : cell.kind;
    if (node.hidden) return;
    if (asked) node.style.setProperty('--sure', cell.confidence);
    const text = blank ? (asked ? short(cell.said, 24) : '␣') : visible(cell.text);
    const struck = cell.struck === undefined ? null : el('s', {}, visible(cell.struck));
    if (struck) node.replaceChildren(struck, text);
    else node.textContent = text;
  }

  onKey(event) {
    const shown = () => this.nodes.findIndex((node) => !node.hidden);
    const moves = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10 };
    let next = this.active;
    if (event.key in moves) {
      const way = Math.sign(moves[event.key]);
      for (let n = Math.abs(moves[event.key]); n > 0; n -= 1) {
        const there = this.nextShown(next < 0 ? -1 : next, way);
        if (there < 0) break;
        next = there;
      }
    } else if (event.key === 'Home') next = shown();
    else if (event.key === 'End') next = this.nextShown(this.nodes.length, -1);
    else if (event.key === 'Escape') return this.onInspect(null);
    else return;
    event.preventDefault();
    this.nodes[this.active]?.setAttribute('aria-selected', 'false');
    this.nodes[this.active]?.removeAttribute('aria-label');
    this.active = next;
    const node = this.nodes[next];
    if (!node) return;
    node.setAttribute('aria-selected', 'true');
    node.setAttribute('aria-label', spoken(this.cells[next] ?? HIDDEN));
    this.box.setAttribute('aria-activedescendant', node.id);
    node.scrollIntoView({ block: 'nearest' });
    this.inspect(node);
  }

  nextShown(from, way) {
    for (let at = from + way; at >= 0 && at < this.nodes.length; at += way) {
      if (!this.nodes[at].hidden) return at;
    }
    return -1;
  }

  inspect(node) {
    if (!node) return;
    const position = Number(node.dataset.at);
    this.onInspect(this.cells[position] ?? HIDDEN, position, node);
  }
}

const classes = new Map();

function classOf(reason) {
  if (!classes.has(reason)) classes.set(reason, `token r-${slug(reason)}`);
  return classes.get(reason);
}

export function slug(reason) {
  return reason.toLowerCase().replace(/[^a-z0-9]+/g, '-').slice(0, 40);
}

export function meaning(reason) {
  return REASONS[reason] ?? 'a reason of this method’s own';
}

function spoken(cell) {
  if (cell.kind === 'blank') {
    return cell.said === undefined ? 'blank' : `blank, likeliest ${short(cell.said)}, ${percent(cell.confidence)}`;
  }
  if (cell.kind === 'given') return short(cell.text) || 'nothing';
  if (cell.kind === 'draft') return `draft ${short(cell.text)}`;
  if (cell.kind === 'struck') return `rejected ${short(cell.text)}`;
  return `${short(cell.text)}, ${cell.reason}`;
}

// What is known of one token: its law, its forward and the reason.
export class Card {
  constructor() {
    this.box = el('div', { class: 'card', role: 'status', hidden: true });
  }

  show(cell, position, node) {
    if (!cell || (cell.kind === 'blank' && cell.said === undefined)) {
      this.box.hidden = true;
      return;
    }
    this.box.replaceChildren(...this.content(cell, position));
    this.box.hidden = false;
    this.place(node);
  }

  place(node) {
    const parent = this.box.offsetParent;
    if (!parent) return;
    const at = node.getBoundingClientRect();
    const around = parent.getBoundingClientRect();
    const most = Math.max(0, around.width - this.box.offsetWidth);
    this.box.style.left = `${Math.min(Math.max(0, at.left - around.left), most)}px`;
    this.box.style.top = `${at.bottom - around.top + 6}px`;
  }

  content(cell, position) {
    const heading = el('p', {}, el('b', {}, short(cell.text ?? cell.said)), ` at position ${position}`);
    if (cell.kind === 'given') return [heading, el('p', {}, 'given')];
    if (cell.kind === 'draft') {
      const chance = cell.q == null ? '' : `, with q ${percent(cell.q, 1)}`;
      return [heading, el('p', {}, `a draft, waiting for the verdict${chance}`)];
    }
    if (cell.kind === 'struck') return [heading, el('p', {}, 'drafted, and rejected')];
    if (cell.kind === 'blank') return [heading, el('p', {}, `likeliest so far, ${percent(cell.confidence, 1)} sure`)];
    const why = el('p', {}, el('b', { class: `key r-${slug(cell.reason)}` }, cell.reason),
      ` in forward ${cell.forward}: ${meaning(cell.reason)}`);
    return [heading, why, cell.law ? lawTable(cell.law, cell.token) : null].filter(Boolean);
  }
}

function lawTable(law, chosen) {
  const texts = law.texts ?? law.tokens.map(String);
  const drafted = law.drafted != null;
  const columns = ['model', 'p', ...(drafted ? ['q'] : [])];
  const head = el('tr', {}, el('th', { scope: 'col' }, 'token'), columns.map((name) => el('th', { scope: 'col' }, name)));
  const rows = law.tokens.map((token, i) => {
    const marks = [token === chosen && 'chosen', token === law.drafted && 'drafted'].filter(Boolean);
    const name = el('th', { scope: 'row' }, short(texts[i], 18), marks.length ? el('small', {}, ` ${marks.join(', ')}`) : null);
    return el('tr', { class: marks.join(' ') }, name, columns.map((column) => bar(law[column]?.[i])));
  });
  const ratio = law.drafted != null && law.drafted !== chosen ? ratioOf(law) : null;
  return el('div', {}, el('table', { class: 'law' }, el('thead', {}, head), el('tbody', {}, rows)), ratio);
}

function bar(value) {
  const cell = el('td', {}, value == null ? '–' : percent(value, value < 0.0995 ? 1 : 0));
  cell.style.setProperty('--part', value ?? 0);
  return cell;
}

function ratioOf(law) {
  const i = law.tokens.indexOf(law.drafted);
  const [p, q] = [law.p?.[i], law.q?.[i]];
  if (p == null || !q) return null;
  return el('p', {}, `the draft was kept with chance min(1, p/q) = ${number(Math.min(1, p / q))}`);
}
