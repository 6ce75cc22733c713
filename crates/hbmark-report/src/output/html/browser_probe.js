'use strict';
// Looks at the page from inside, once it stands, and tells its parent.
const errors = [];
let alerts = 0;
addEventListener('error', (event) => errors.push(event.message));
addEventListener('unhandledrejection', (event) => errors.push(String(event.reason)));
document.addEventListener('securitypolicyviolation', (event) => errors.push(`${event.violatedDirective} ${event.blockedURI}`));
window.alert = () => { alerts += 1; };

const visible = (element) => element.getClientRects().length > 0;
const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// The texts of a drawing that cover each other by more than a hair.
const overlapping = (svg) => {
  const texts = [...svg.querySelectorAll('text')].filter((t) => !t.hasAttribute('transform'));
  const boxes = texts.map((t) => [t.textContent, t.getBoundingClientRect()]);
  const found = [];
  boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
    const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (across > 1 && down > 4) found.push(`${svg.dataset.name}: ${a} / ${b}`);
  }));
  return found;
};

const look = async () => {
  for (const folded of document.querySelectorAll('details')) folded.open = true;
  const drawings = [...document.querySelectorAll('svg')].filter(visible);
  const marks = {};
  for (const section of document.querySelectorAll('section[id]')) {
    marks[section.id] = [...section.querySelectorAll('svg .mark')].filter(visible).length;
  }

  // What a saved drawing would be called and be, without saving it.
  const saved = {};
  const made = new Map();
  const create = URL.createObjectURL;
  URL.createObjectURL = (blob) => { const url = create.call(URL, blob); made.set(url, blob.type); return url; };
  HTMLAnchorElement.prototype.click = function () { saved[this.download.split('.').pop()] = `${this.download} ${made.get(this.href)}`; };
  const buttons = document.querySelector('figure .panel')?.querySelectorAll('button[data-save]') ?? [];
  for (const button of buttons) button.click();
  for (let i = 0; buttons.length && i < 50 && !saved.png; i += 1) await wait(20);
  // A picture is made on another thread, and waiting passes no real time here: messages do.
  const turn = () => new Promise((done) => { const { port1, port2 } = new MessageChannel(); port1.onmessage = done; port2.postMessage(0); });
  for (let i = 0; buttons.length && i < 200000 && !saved.png; i += 1) await turn();

  let hover = null;
  const wanted = ['decode/native/bf16/b1/c128\n', 'TTFT p50 '];
  const named = [...(document.querySelector('figure')?.querySelectorAll('svg .mark') ?? [])].find((m) => visible(m) && wanted.some((w) => m.textContent.startsWith(w)));
  if (named) {
    const box = named.lastElementChild.getBoundingClientRect();
    named.dispatchEvent(new PointerEvent('pointermove', { bubbles: true, clientX: box.x + box.width / 2, clientY: box.y + box.height / 2 }));
    const shown = document.getElementById('hover');
    hover = shown.hidden ? null : shown.textContent.split('\n')[0];
  }

  const page = document.documentElement;
  const wide = [...document.querySelectorAll('body *')]
    .filter((e) => !e.closest('.scroll') && e.getBoundingClientRect().right > page.clientWidth + 1)
    .slice(0, 5).map((e) => `${e.tagName} ${e.getAttribute('class')}`);
  parent.postMessage(JSON.stringify({
    width: window.innerWidth,
    overflow: page.scrollWidth - page.clientWidth,
    wide,
    classes: [...new Set(drawings.map((d) => d.getAttribute('class')))],
    marks,
    hover,
    saved,
    // The first table: what it shows, and what can be seen of it without scrolling.
    columns: [...(document.querySelector('table')?.querySelectorAll('th') ?? [])].filter(visible).map((th) => th.textContent),
    hidden: [...document.querySelectorAll('.columns .scroll')].map((s) => s.scrollWidth - s.clientWidth),
    overlaps: drawings.flatMap(overlapping),
    images: document.images.length,
    alerts,
    errors,
    requests: performance.getEntriesByType('resource').map((e) => e.name).filter((name) => !name.startsWith('blob:')),
  }), '*');
};
look().catch((error) => parent.postMessage(JSON.stringify({ errors: [String(error)] }), '*'));
