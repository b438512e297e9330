const state = {query: DATA.first, head: -1, detail: 0, pair: null};
const SVG = 'http://www.w3.org/2000/svg';
const say = v => Math.abs(v) < 0.005 ? '0.00' : (v > 0 ? '+' : '') + minus(v.toFixed(2));
const plain = v => minus(v.toFixed(2));
const at = () => DATA.queries[state.query];
const colour = v => v < 0 ? 'var(--negative)' : 'var(--positive)';

const title = make('h1', '', {'aria-live': 'polite'});
make('p', 'Arcs run from the chosen token to what heads read there; the wider, the more was written from it towards the target, red for it and blue against it. '
  + (DATA.queries.length > 1 ? 'Click an underlined token to see its own logit, ' : 'Click ') + 'a head to see it alone, a source to see why it was read.'
  + (DATA.queries.some(q => q.copies.length) ? ' Dashed tokens followed an earlier copy of the chosen one.' : ''), {class: 'how'});
const text = make('div', null, {class: 'text', role: 'group', 'aria-label': 'text'});
const arcs = add(text, 'svg', {'aria-hidden': 'true'});
const known = new Map(DATA.queries.map((q, i) => [q.position, i]));
const tokens = DATA.tokens.map((token, i) => {
  const node = make(known.has(i) ? 'button' : 'span', token, {class: 'token', 'data-at': i}, text);
  if (known.has(i)) { node.type = 'button'; node.onclick = () => choose(known.get(i)); }
  if (DATA.breaks[i]) make('br', null, null, text);
  return node;
});
const tools = make('div', null, {class: 'row tools'});
const [, barPen] = board(250, 30, tools);
const all = make('button', 'all heads', {type: 'button'}, tools);
all.onclick = () => only(-1);
const switches = DATA.details.map((name, d) => {
  const b = make('button', name, {type: 'button'}, tools);
  b.onclick = () => { state.detail = d; cards(); paint(); };
  return b;
});
const sheet = make('div', null, {class: 'cards'});
make('p', DATA.caption);

const marks = () => state.head < 0 ? at().marks : at().heads[state.head].marks;
function choose(query) { state.query = query; state.head = -1; state.pair = null; update(); }
function only(head) { state.head = state.head === head ? -1 : head; state.pair = null; cards(); paint(); }

/* The text: what was written from each token, by all heads or by one. */
function paint() {
  const q = at(), values = marks(), copies = new Set(q.copies);
  tokens.forEach((node, i) => {
    const v = i < values.length ? values[i] : null, c = v ? shade(v, DATA.limit) : null;
    node.style.background = c ? rgb(c) : ''; node.style.color = c ? ink(c) : '';
    node.classList.toggle('later', i > q.position); node.classList.toggle('here', i === q.position);
    node.classList.toggle('copy', copies.has(i));
    node.title = `${i}: ${DATA.tokens[i]}` + (v === null ? '' : `, ${say(v)} written from it`) + (copies.has(i) ? `; followed an earlier ${q.token}` : '');
    node.dataset.value = v ?? '';
    if (known.has(i)) node.setAttribute('aria-pressed', i === q.position);
  });
  barPen.clearRect(0, 0, 250, 30);
  bar(barPen, 24, 2, 120, DATA.limit, true, 'written (logits)');
  all.setAttribute('aria-pressed', state.head < 0);
  switches.forEach((b, d) => b.setAttribute('aria-pressed', d === state.detail));
  draw();
}

/* The arcs, on the tokens as they lie in the lines of the text. */
function draw() {
  arcs.replaceChildren();
  arcs.setAttribute('width', text.clientWidth); arcs.setAttribute('height', text.scrollHeight);
  const from = place(at().position), seen = new Map();
  for (const [h, p, pair] of pairs().reverse()) {
    if (state.head >= 0 && h !== state.head) continue;
    const to = place(pair.source), n = seen.get(pair.source) ?? 0;
    seen.set(pair.source, n + 1);
    const x = to.x + Math.min(n * 3, to.half - 2), same = to.y === from.y, rise = Math.min(30, 9 + 0.12 * Math.abs(x - from.x) + 2 * n);
    const path = pair.source === at().position
      ? `M${x - 5},${to.y} C${x - 14},${to.y - 17 - 2 * n} ${x + 14},${to.y - 17 - 2 * n} ${x + 5},${to.y}`
      : same ? `M${from.x},${from.y} C${from.x},${from.y - rise} ${x},${to.y - rise} ${x},${to.y}`
        : `M${from.x},${from.y} C${from.x},${from.y - 34} ${x},${to.y + 58} ${x},${to.y + to.tall}`;
    const hot = state.pair && state.pair[0] === h && state.pair[1] === p, thick = 0.8 + 5 * Math.abs(pair.written) / DATA.limit;
    add(arcs, 'path', {d: path, stroke: colour(pair.written), 'stroke-width': thick, opacity: hot ? 1 : state.pair ? 0.2 : 0.7, 'data-pair': `${at().heads[h].name} ${pair.source}`});
  }
}
const pairs = () => at().heads.flatMap((h, i) => h.pairs.map((pair, p) => [i, p, pair])).sort((a, b) => Math.abs(b[2].written) - Math.abs(a[2].written));
function place(i) {
  const t = tokens[i];
  return {x: t.offsetLeft + t.offsetWidth / 2, y: t.offsetTop, half: t.offsetWidth / 2, tall: t.offsetHeight};
}

/* Scrolls a long text to a token that is out of sight. */
function see(i) {
  const t = tokens[i], low = text.scrollTop, high = low + text.clientHeight;
  if (t.offsetTop < low || t.offsetTop + t.offsetHeight > high) text.scrollTop = t.offsetTop - text.clientHeight / 2;
}

/* A list of signed bars that sum to a number. */
function bars(list, longest, name, parent) {
  const node = make('div', null, {class: 'bars', role: 'list', 'aria-label': name}, parent);
  for (const [label, value] of list) {
    const row = make('div', null, {role: 'listitem', 'data-name': label, 'data-value': value}, node);
    make('span', label, {title: label}, row);
    const track = make('i', null, {'aria-hidden': 'true'}, row), part = 50 * Math.min(1, Math.abs(value) / longest);
    make('u', null, {style: `width:${part}%;${value < 0 ? 'right' : 'left'}:50%;background:${colour(value)}`}, track);
    make('b', say(value), null, row);
  }
}
function cards() {
  const q = at();
  sheet.replaceChildren();
  q.heads.forEach((head, h) => {
    const card = make('section', null, {class: 'card' + (state.head >= 0 && state.head !== h ? ' off' : ''), 'aria-label': head.name}, sheet);
    const top = make('div', null, {class: 'top'}, card);
    const name = make('button', head.name, {type: 'button', 'aria-pressed': state.head === h}, top);
    name.onclick = () => only(h);
    make('span', 'wrote ', null, top).appendChild(make('b', say(head.sum), {'data-value': head.sum}, top));
    make('span', ` of the logit ${plain(q.logit)}`, null, top);
    head.pairs.forEach((pair, p) => why(card, pair, h, p, p === 0));
  });
  const rest = make('section', null, {class: 'card rest', 'aria-label': 'everything else'}, sheet);
  make('div', 'Everything else', {class: 'top'}, rest);
  bars(q.rest, Math.max(...q.rest.map(r => Math.abs(r[1]))) || 1, 'everything else', rest);
  const sum = make('p', 'All that the page shows sums to ', {class: 'sum'}, rest);
  make('b', plain(q.total), {'data-value': q.total}, sum); sum.append('; the model’s logit of ');
  make('code', q.target, null, sum); sum.append(' is '); make('b', plain(q.logit), {'data-value': q.logit}, sum);
}
/* One source of one head: what was written, and why it was read. */
function why(card, pair, h, p, open) {
  const one = make('details', null, {class: 'pair', 'data-source': pair.source}, card);
  one.open = open;
  const line = make('summary', null, null, one);
  make('b', say(pair.written), {'data-value': pair.written, style: `color:${colour(pair.written)}`}, line);
  make('span', ' from ', null, line); make('code', DATA.tokens[pair.source], null, line);
  make('span', ` at ${pair.source}, attention `, null, line); make('b', plain(pair.attention), {'data-value': pair.attention}, line);
  make('h3', `its score, ${say(pair.total)} from the row’s mean, is the sum of`, {'data-value': pair.total}, one);
  bars(pair.score[state.detail], DATA.longest[0], 'terms of the score', one);
  make('h3', 'what was written, by the parts of the source', null, one);
  bars(pair.value[state.detail], DATA.longest[1], 'parts of the source', one);
  codeLine(one).show(`${DATA.queries.length > 1 ? `explanations[${state.query}]` : 'explanation'}.${pair.code}`);
  const point = on => () => { state.pair = on ? [h, p] : null; draw(); };
  line.onclick = () => see(pair.source);
  one.onpointerenter = line.onfocus = point(true); one.onpointerleave = line.onblur = point(false);
}
function update() { title.textContent = at().title; cards(); paint(); }
new ResizeObserver(draw).observe(text);
dark.addEventListener('change', paint);
update();
see(at().position);
document.body.dataset.drawn = performance.now();
