// Asking the server: JSON, and server-sent events that answer a POST.

let key = '';

export function useKey(given) {
  key = given;
}

function headers() {
  const own = { 'content-type': 'application/json' };
  return key ? { ...own, authorization: `Bearer ${key}` } : own;
}

async function ask(path, options) {
  const response = await fetch(path, options);
  if (response.ok) return response;
  throw Object.assign(new Error(await reason(response)), { status: response.status });
}

async function reason(response) {
  const told = await response.json().catch(() => ({}));
  if (typeof told.error === 'string') return told.error;
  if (told.error?.message) return told.error.message;
  if (Array.isArray(told.detail)) return told.detail.map((one) => `${one.loc.slice(1).join('.')}: ${one.msg}`).join('; ');
  return `the server answered ${response.status}.`;
}

export async function about() {
  return (await ask('/page/about', { headers: headers() })).json();
}

export async function loadModel(model) {
  return (await ask('/page/load', { method: 'POST', headers: headers(), body: JSON.stringify({ model }) })).json();
}

export async function emptyReplay() {
  return (await ask('/page/replay.html', { headers: headers() })).text();
}

// Calls `onLine` for every line of a stream. Aborting the signal ends the work at the server too.
export async function stream(path, body, signal, onLine) {
  const response = await ask(path, { method: 'POST', headers: headers(), body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith('data: ') ? part.slice(6) : null;
      if (data && data !== '[DONE]') onLine(JSON.parse(data));
    }
  }
}

// One piece of work at a time, that a button starts and another stops.
export class Work {
  constructor(startButton, stopButton, onError) {
    Object.assign(this, { startButton, stopButton, onError, controller: null });
    stopButton.disabled = true;
    stopButton.addEventListener('click', () => this.stop());
  }

  get runs() {
    return this.controller !== null;
  }

  stop() {
    this.controller?.abort();
  }

  async run(path, body, onLine) {
    this.stop();
    const controller = new AbortController();
    this.controller = controller;
    this.startButton.disabled = true;
    this.stopButton.disabled = false;
    try {
      await stream(path, body, controller.signal, onLine);
      return true;
    } catch (error) {
      if (!controller.signal.aborted) this.onError(error.message);
      return false;
    } finally {
      if (this.controller === controller) this.controller = null;
      this.startButton.disabled = false;
      this.stopButton.disabled = true;
    }
  }
}
