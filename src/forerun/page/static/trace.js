// A trace as steps that can be taken forwards and backwards. Every step knows which cells of the
// canvas it changes, from what and to what, so going anywhere costs only what lies between.

const NOTHING = { kind: 'blank' };
const SHOWS_BLANKS = new Set(['masked', 'block']);
const SECONDS_PER_FORWARD = 0.1; // for traces that know no time
const FARTHEST = 1_000_000; // no canvas is longer; a file may say anything

export class Run {
  constructor(request = 0) {
    this.request = request;
    this.start = null;
    this.showsBlanks = false; // does the picture show places that are still blank?
    this.end = null;
    this.cells = []; // as they are after all steps
    this.steps = [];
    this.rows = []; // chains that were guessed, forward by forward
    this.routes = []; // what routers decided
    this.transient = new Set(); // positions that the next forward clears
    this.draft = null;
    this.totals = {
      forward: 0, drafts: 0, tokens: 0, drafted: 0, accepted: 0, rejected: 0, time: 0, reasons: {},
    };
  }

  get method() {
    return this.start?.method ?? 'trace';
  }


  push(line) {
    const take = { start: this.onStart, end: this.onEnd, forward: this.onForward,
      draft: this.onDraft, router: this.onRouter, commit: this.onCommit }[line.kind ?? 'commit'];
    if (!take) return false;
    this.changes = [];
    this.totals = { ...this.totals, time: this.timeOf(line) };
    take.call(this, line);
    this.steps.push({ changes: this.changes, totals: this.totals, line });
    return true;
  }

  timeOf(line) {
    if (Number.isFinite(line.time)) return Math.max(line.time, this.totals.time);
    if (line.kind === 'end' || line.kind === 'start') return this.totals.time;
    return Math.max(this.totals.time, (line.forward ?? 0) * SECONDS_PER_FORWARD);
  }

  cell(position) {
    return this.cells[position] ?? NOTHING;
  }

  set(position, cell) {
    if (!Number.isInteger(position) || position < 0 || position > FARTHEST) return;
    this.changes.push([position, this.cell(position), cell]);
    this.cells[position] = cell;
  }

  onStart(line) {
    this.start = line;
    const first = line.tokens.indexOf(null);
    const hasHoles = first >= 0 && line.tokens.slice(first).some((token) => token !== null);
    this.showsBlanks = hasHoles || SHOWS_BLANKS.has(line.family);
    line.tokens.forEach((token, position) => {
      if (token === null) this.set(position, NOTHING);
      else this.set(position, { kind: 'given', text: line.texts?.[position] ?? String(token) });
    });
  }

  onForward(line) {
    this.totals.time = this.timeOf(line);
    if (line.draft) {
      this.totals.drafts += 1;
      return;
    }
    this.totals.forward = Math.max(this.totals.forward, line.forward);
    this.clear((cell) => cell.kind !== 'draft');
    line.positions.forEach((position, i) => {
      const cell = this.cell(position);
      const said = { said: line.texts?.[i] ?? String(line.tokens[i]), confidence: line.confidence[i] };
      if (cell.kind === 'blank') this.passing(position, { kind: 'blank', ...said });
    });
    if (line.chain?.length) this.rows.push({ step: this.steps.length, line });
  }

  onDraft(line) {
    this.clear(() => true);
    this.draft = line;
    line.positions.forEach((position, i) => {
      const kind = this.cell(position).kind;
      if (kind === 'token' || kind === 'given') return;
      const text = line.texts?.[i] ?? String(line.tokens[i]);
      this.passing(position, { kind: 'draft', text, q: line.q?.[i] });
    });
  }

  onRouter(line) {
    this.routes.push({ step: this.steps.length, line });
  }

  onCommit(line) {
    const { tokens, positions, reason } = line;
    const totals = this.totals;
    totals.forward = Math.max(totals.forward, line.forward);
    const edits = reason === 'edited';
    if (!edits) totals.tokens += tokens.length;
    if (tokens.length) totals.reasons = { ...totals.reasons, [reason]: (totals.reasons[reason] ?? 0) + tokens.length };
    const rejected = line.rejected_texts ?? (line.rejected ?? []).map(String);
    if (!edits && line.drafted?.length) {
      totals.drafted += line.drafted.length;
      totals.rejected += rejected.length;
      totals.accepted += line.drafted.length - rejected.length;
    }
    const places = positions ?? this.nextPlaces(tokens.length);
    tokens.forEach((token, i) => {
      const before = this.cell(places[i]);
      const struck = edits ? rejected[i] : before.kind === 'struck' ? before.text : undefined;
      this.passing(places[i], {
        kind: 'token', text: line.texts?.[i] ?? String(token), token, reason,
        forward: line.forward, law: line.laws?.[i] ?? null, struck,
      });
    });
    if (!edits) this.strike(places, rejected);
  }

  // Rejected tokens fall where they were drafted, as far as that is known.
  strike(places, rejected) {
    const known = this.draft?.positions ?? [];
    const after = (places.at(-1) ?? this.lastDecided()) + 1;
    rejected.forEach((text, i) => {
      const position = known[places.length + i] ?? after + i;
      const kind = this.cell(position).kind;
      if (kind === 'blank' || kind === 'draft') this.passing(position, { kind: 'struck', text });
    });
  }

  lastDecided() {
    return this.cells.findLastIndex((cell) => cell.kind === 'token' || cell.kind === 'given');
  }

  nextPlaces(count) {
    const first = this.lastDecided() + 1;
    return Array.from({ length: count }, (_, i) => first + i);
  }

  onEnd(line) {
    this.end = line;
    this.clear(() => true);
    if (line.stats?.forwards) this.totals.forward = line.stats.forwards;
    if (line.stats?.draft_forwards) this.totals.drafts = line.stats.draft_forwards;
  }

  // Set what the next forward will clear.
  passing(position, cell) {
    this.set(position, cell);
    this.transient.add(position);
  }

  clear(which) {
    for (const position of this.transient) {
      const cell = this.cell(position);
      if (!which(cell)) continue;
      this.transient.delete(position);
      if (cell.kind === 'token') {
        if (cell.struck !== undefined) this.set(position, { ...cell, struck: undefined });
      } else if (cell.kind !== 'given') this.set(position, NOTHING);
    }
  }

  get tokens() {
    return this.cells.filter((cell) => cell.kind === 'token');
  }

  get text() {
    return this.end?.text ?? this.tokens.map((cell) => cell.text).join('');
  }
}

// The lines of a trace file. A line that is none is named by its number.
export function readTrace(content) {
  const lines = [];
  content.split('\n').forEach((text, i) => {
    if (!text.trim()) return;
    const line = parsed(text);
    if (!isLine(line)) throw new Error(`line ${i + 1} is not a line of a trace.`);
    lines.push(line);
  });
  if (!lines.length) throw new Error('there is nothing in this trace.');
  return lines;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function isLine(line) {
  if (line === null || typeof line !== 'object' || Array.isArray(line)) return false;
  if (line.request !== undefined && !(Number.isInteger(line.request) && line.request >= 0)) return false;
  const numbers = (values) => Array.isArray(values) && values.every((v) => typeof v === 'number');
  const texts = (values) => values === undefined
    || (Array.isArray(values) && values.every((v) => typeof v === 'string'));
  if (!texts(line.texts) || !texts(line.rejected_texts) || !texts(line.chain_texts)) return false;
  const kind = line.kind ?? 'commit';
  if (kind === 'commit') {
    return numbers(line.tokens) && typeof line.reason === 'string' && Number.isInteger(line.forward)
      && (line.positions === undefined || numbers(line.positions));
  }
  if (kind === 'forward') return numbers(line.positions) && numbers(line.confidence);
  if (kind === 'draft') return numbers(line.positions) && numbers(line.tokens);
  if (kind === 'start') return Array.isArray(line.tokens);
  return typeof kind === 'string';
}
