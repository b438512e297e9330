const state = {count: DATA.start, node: 0};
const SVG = 'http://www.w3.org/2000/svg', ROW = 22, SLOT = 38, LOW = 60, WIDE = 78, GAP = 16, EMPTY = 3;
const say = v => Math.abs(v) < 0.0005 ? '0.00' : (v > 0 ? '+' : '') + minus(v.toFixed(Math.abs(v) < 0.095 ? 3 : 2));
const percent = v => `${(100 * v).toFixed(0)}%`;
const colour = v => v < 0 ? 'var(--negative)' : 'var(--positive)';
const TYPES = ['value', 'query', 'key'], DASHES = ['', '6 3', '2 2.5'];
const N = DATA.nodes, texts = new Map(DATA.tokens.map(([p, text]) => [p, text])), places = new Map(DATA.tokens.map(([p, , place]) => [p, place]));
const into = N.map(() => []), outOf = N.map(() => []);
DATA.edges.forEach((edge, e) => { outOf[edge[0]].push(e); into[edge[1]].push(e); });
const largest = Math.max(...N.map(n => Math.abs(n.value)), ...N.map(n => Math.abs(n.moved))) || 1;
const place = n => n.position < 0 ? '' : ` at ${places.get(n.position)}`;
const name = n => n.shape === 'logit' ? `logit ${DATA.target}` : n.name + place(n) + (n.position < 0 ? '' : ` ${texts.get(n.position)}`);
/* What stands beside a mean (its interval, in how many prompts) or a comparison (both numbers). */
function note(numbers, mark) {
  if (!numbers.length) return '';
  const [a, b, count] = numbers, both = v => v === null ? 'not' : say(v);
  if (DATA.prompts) return (a === null ? '' : `${say(a)} to ${say(b)}, `) + `in ${count} of ${DATA.prompts} prompts`;
  return `${both(a)} in the first, ${both(b)} in the second` + (mark && b !== null && a !== null ? `; only the ${mark === 1 ? 'first' : 'second'} graph has it` : '');
}
const about = n => `${name(n)}: wrote ${say(n.value)}, moved ${say(n.moved)}` + (n.numbers.length ? ` (written: ${note(n.numbers, n.mark)})` : '');
const dash = (mark, wide) => DATA.dashes[mark - 1].map(length => (length * Math.max(1, wide / 2)).toFixed(1)).join(' ');

make('h1', DATA.title);
make('p', 'Discs are heads, squares MLPs, triangles tokens. The size of a mark shows what it writes towards the logit; the width of its ring, how much it changes the logit by moving the attention of later heads. Lines are value edges. Red is for the logit, blue against it. ' + (DATA.legend ? DATA.legend + ' ' : '') + 'Click a mark, or go from mark to mark with the arrow keys. A click on a line, or on a number in a list, gives the code of that edge.', {class: 'how'});
const tools = make('div', null, {class: 'row tools'}), label = make('label', 'nodes ', null, tools);
const slider = make('input', null, {type: 'range', min: 1, max: N.length, value: DATA.start, 'aria-label': 'nodes shown'}, label);
slider.oninput = () => { state.count = +slider.value; arrange(); };
const said = make('output', '', {class: 'shown'}, tools);
const sheet = make('div', null, {class: 'sheet', role: 'group', 'aria-label': 'graph'});
const blocks = make('div', null, {class: 'blocks', 'aria-hidden': 'true'}, sheet);
const svg = add(sheet, 'svg', {});
make('div', null, {class: 'corner'}, sheet);
const tokens = make('div', null, {class: 'tokens', 'aria-hidden': 'true'}, sheet);
const heading = make('div', null, {'aria-live': 'polite'}), cards = make('div', null, {class: 'cards'});
make('p', DATA.caption);

/* Nodes come by the share at which they appear. */
const share = () => N[state.count - 1].reached;
/* Nodes and value edges that are shown: of the edges into a node the largest, up to the share. */
const visible = () => N.map((n, i) => i === state.node || n.shape === 'logit' || n.reached <= share());
function drawnEdges(seen) {
  const most = share();
  return N.flatMap((_, t) => {
    if (!seen[t]) return [];
    const own = into[t].filter(e => DATA.edges[e][2] === 0 && seen[DATA.edges[e][0]]);
    const all = own.reduce((sum, e) => sum + Math.abs(DATA.edges[e][3]), 0);
    let before = 0;
    return own.filter(e => { const keep = before <= most * all; before += Math.abs(DATA.edges[e][3]); return keep; });
  });
}

/* Where marks lie: a column for each position that has one, a row for each part of a block. */
function layOut(seen) {
  const cells = new Map(), shown = N.map((_, i) => i).filter(i => seen[i]);
  for (const i of shown) {
    const key = `${N[i].position} ${N[i].row}`;
    cells.set(key, [...(cells.get(key) || []), i]);
  }
  const most = new Map();
  for (const members of cells.values()) {
    const p = N[members[0]].position;
    most.set(p, Math.max(most.get(p) || 0, members.length));
  }
  const order = [...most.keys()].sort((a, b) => a - b);
  const wide = order.map((p, i) => [p, Math.max(p < 0 ? WIDE : LOW, most.get(p) * SLOT), i && p > order[i - 1] + 1 ? GAP : 0]);
  const total = wide.reduce((sum, [, w, gap]) => sum + w + gap, 30);
  const spare = Math.max(0, (sheet.clientWidth - 60 - total) / order.length);
  const columns = new Map(), lines = new Map(), rows = new Set(shown.map(i => N[i].row));
  let x = 6, y = 14;
  for (const [p, w, gap] of wide) { columns.set(p, [x + gap, w + spare]); x += gap + w + spare; }
  for (let r = 2 * DATA.blocks + 1; r >= 0; r--) { const tall = rows.has(r) ? ROW : EMPTY; lines.set(r, y + tall / 2); y += tall; }
  const points = new Map();
  const byName = (a, b) => N[a].name.localeCompare(N[b].name, 'en', {numeric: true});
  for (const members of cells.values()) members.sort(byName).forEach((i, k) => {
    const [left, w] = columns.get(N[i].position);
    points.set(i, [left + w * (k + 0.5) / members.length, lines.get(N[i].row)]);
  });
  return {points, columns, lines, rows, width: Math.max(x + 24, sheet.clientWidth - 60), height: y + 6};
}

function draw() {
  const seen = visible(), at = layOut(seen), focused = document.activeElement && document.activeElement.classList.contains('node');
  svg.replaceChildren(); blocks.replaceChildren(); tokens.replaceChildren();
  svg.setAttribute('width', at.width); svg.setAttribute('height', at.height);
  tokens.style.width = `${at.width}px`;
  const drawn = drawnEdges(seen), own = new Set([...into[state.node], ...outOf[state.node]]);
  const lines = [...drawn.filter(e => !own.has(e)), ...[...own].filter(e => seen[DATA.edges[e][0]] && seen[DATA.edges[e][1]])];
  for (const e of lines) {
    const [s, t, type, weight, marked] = DATA.edges[e], [x0, y0] = at.points.get(s), [x1, y1] = at.points.get(t), middle = (y0 + y1) / 2;
    const thick = 0.7 + 7 * Math.sqrt(Math.abs(weight) / largest) ** 1.5, options = {d: `M${x0},${y0} C${x0},${middle} ${x1},${middle} ${x1},${y1}`, 'stroke-width': thick.toFixed(2), opacity: own.has(e) ? 0.9 : 0.3, 'data-edge': e};
    if (marked) options['stroke-dasharray'] = dash(marked, thick);
    else if (DASHES[type]) options['stroke-dasharray'] = DASHES[type];
    const path = add(svg, 'path', options);
    path.style.stroke = colour(weight);
    path.onclick = () => { choose(t); pick(e); };
  }
  N.forEach((n, i) => seen[i] && mark(n, i, at.points.get(i)));
  for (const [r, y] of at.lines) {
    const block = (r - 1) >> 1, text = r === 0 ? 'tokens' : r > 2 * DATA.blocks ? 'logit' : r % 2 ? `block ${block}` : `MLP ${block}`;
    if (at.rows.has(r)) make('span', text, {style: `top:${y}px`}, blocks);
  }
  for (const [p, [x, w]] of at.columns) {
    const box = make('span', null, {style: `left:${x + w / 2}px;max-width:${w - 4}px`, title: p < 0 ? '' : texts.get(p)}, tokens);
    make('b', p < 0 ? 'constants' : texts.get(p) || places.get(p), null, box); box.append(p < 0 || !texts.get(p) ? '' : places.get(p));
  }
  if (focused) pressed().focus({preventScroll: true});
  const written = N.reduce((sum, n, i) => sum + (seen[i] && n.shape !== 'logit' ? Math.abs(n.value) : 0), 0);
  const reaching = drawn.filter(e => N[DATA.edges[e][1]].shape === 'logit').reduce((sum, e) => sum + DATA.edges[e][3], 0);
  const count = seen.filter(Boolean).length, T = N[0].value;
  said.textContent = `${count} of ${DATA.all} nodes, ${percent(written / (DATA.written || 1))} of ${DATA.whole}; the edges into the logit sum to ${minus(reaching.toFixed(2))} of T = ${minus(T.toFixed(2))}` + (Math.abs(T) > 0.05 ? ` (${minus(percent(reaching / T))})` : '');
  said.dataset.reaching = reaching; said.dataset.count = count;
}

/* One mark: its area is what it writes, its ring what it does by moving attention. */
function mark(n, i, [x, y]) {
  const node = add(svg, 'g', {class: 'node', transform: `translate(${x},${y})`, role: 'button', tabindex: i === state.node ? 0 : -1, 'aria-pressed': i === state.node, 'aria-label': about(n), 'data-node': i});
  const r = n.shape === 'logit' ? 9 : 3 + 7 * Math.sqrt(Math.abs(n.value) / largest), ring = 6 * Math.abs(n.moved) / largest;
  const shape = size => ({head: `M${-size},0a${size},${size} 0 1,0 ${2 * size},0a${size},${size} 0 1,0 ${-2 * size},0z`,
    mlp: `M${-size},${-size}h${2 * size}v${2 * size}h${-2 * size}z`, token: `M0,${-size}L${size},${size}H${-size}z`}[n.shape]
    || `M0,${-size}L${size},0L0,${size}L${-size},0z`);
  const around = r * (n.shape === 'head' ? 1 : 1.4) + 1.5;
  if (ring > 0.4) add(node, 'circle', {r: around + ring / 2, class: 'ring', 'stroke-width': ring.toFixed(2)}).style.stroke = colour(n.moved);
  const disc = add(node, 'path', {d: shape(r), class: n.mark ? 'disc hollow' : 'disc'});
  disc.style.fill = disc.style.stroke = colour(n.value);
  add(node, 'circle', {r: around + ring + 2.5, class: 'here'});
  add(node, 'circle', {r: 11, fill: 'transparent'});
  if (n.shape === 'head' || n.shape === 'logit') add(node, 'text', {x: around + ring + 1, y: 3}, n.shape === 'head' ? n.name.slice(n.name.indexOf('H')) : 'T');
  add(node, 'title', {}, about(n));
  node.onclick = () => choose(i);
  node.onkeydown = event => step(event, i, x, y);
}

/* The nearest mark in the direction of an arrow key. */
function step(event, i, x, y) {
  const way = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
  if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); return choose(i); }
  if (!way) return;
  event.preventDefault();
  let best = null, least = Infinity;
  for (const other of svg.querySelectorAll('.node')) {
    const [u, v] = other.getAttribute('transform').match(/[-\d.]+/g).map(Number);
    const along = (u - x) * way[0] + (v - y) * way[1], aside = Math.abs((u - x) * way[1]) + Math.abs((v - y) * way[0]);
    if (along > 1 && along + 3 * aside < least) { least = along + 3 * aside; best = other; }
  }
  if (best) { choose(+best.dataset.node); pressed().focus({preventScroll: true}); reveal(); }
}
function choose(i) { state.node = i; draw(); explain(); }
/* Scroll the sheet, and not the page around it, until a mark is seen. */
const pressed = () => svg.querySelector('[aria-pressed=true]');
/* A new layout keeps the chosen mark in sight; until one is chosen, the sheet shows its start. */
function arrange() { draw(); if (state.node) reveal(); }
function reveal() {
  const [x, y] = pressed().getAttribute('transform').match(/[-\d.]+/g).map(Number);
  const right = sheet.clientWidth - 60, low = sheet.clientHeight - 50;
  if (x < sheet.scrollLeft + 20 || x > sheet.scrollLeft + right - 20) sheet.scrollLeft = x - right / 2;
  if (y < sheet.scrollTop + 20 || y > sheet.scrollTop + low) sheet.scrollTop = y - low / 2;
}

/* A list of edges with what it leaves out; a click on a name chooses the node. */
function list(title, about, edges, end, total, parent, type) {
  const card = make('section', null, {class: 'card', 'aria-label': title}, parent);
  make('h3', title, null, card);
  if (about) make('p', about, null, card);
  const order = [...edges].sort((a, b) => Math.abs(DATA.edges[b][3]) - Math.abs(DATA.edges[a][3])).slice(0, 12);
  const shown = order.map(e => [N[DATA.edges[e][end]], DATA.edges[e][3], DATA.edges[e][end], DATA.edges[e][2], note(DATA.edges[e].slice(5)), e]);
  const rest = total === null ? 0 : total - shown.reduce((sum, s) => sum + s[1], 0);
  const longest = Math.max(...shown.map(s => Math.abs(s[1])), Math.abs(rest)) || 1;
  for (const [n, weight, i, read, beside, e] of shown) {
    const row = line(weight, longest, card, e);
    const text = name(n) + (type === null ? `, its ${TYPES[read]}` : '');
    const button = make('button', text, {type: 'button', title: text}, row);
    button.onclick = () => { choose(i); reveal(); };
    row.prepend(button);
    if (beside) make('small', beside, null, row);
  }
  if (total !== null) {
    const row = line(rest, longest, card);
    row.prepend(make('span', 'everything else', {class: 'rest'}, row));
    const sum = make('div', 'sum', {class: 'sum'}, card);
    make('span', say(total), {'data-total': total}, sum);
  } else if (!shown.length) make('p', 'none that the page holds', null, card);
  const lookup = N[state.node].lookup;  // an average and a comparison have no such function
  if (lookup.startsWith('graph.') && type !== null) codeLine(card).show(`graph.${end ? 'edges_from' : 'edges_into'}(${lookup}, '${TYPES[type]}')`);
}
function line(weight, longest, card, e) {
  const row = make('div', null, {class: 'line', 'data-value': weight}, card), track = make('i', null, {'aria-hidden': 'true'}, row);
  make('u', null, {style: `width:${50 * Math.abs(weight) / longest}%;${weight < 0 ? 'right' : 'left'}:50%;background:${colour(weight)}`}, track);
  if (e === undefined) make('b', say(weight), null, row);
  else make('button', say(weight), {type: 'button', class: 'edge', title: 'code of this edge', 'data-edge': e}, row).onclick = () => pick(e);
  return row;
}
/* The code of an edge, below its number. */
function pick(e) {
  cards.querySelector('.line .code')?.remove();
  codeLine(cards.querySelector(`[data-edge="${e}"]`).parentElement).show(`graph.weights[${DATA.at[e]}]`);
}
/* What is known of the chosen node. */
function explain() {
  const n = N[state.node];
  heading.replaceChildren(); cards.replaceChildren();
  make('h2', name(n), null, heading);
  make('p', (n.shape === 'logit' ? `T = ${minus(n.value.toFixed(4))}` : `It writes ${say(n.value)} towards the logit. By moving the attention of later heads it adds ${say(n.moved)} (first order).`)
    + (n.numbers.length ? (n.shape === 'logit' ? ': ' : ' Written: ') + `${note(n.numbers, n.mark)}.` : ''), {class: 'numbers'}, heading);
  codeLine(heading).show(`graph.values[${n.lookup}]`);
  const of = (edges, type) => edges.filter(e => DATA.edges[e][2] === type);
  if (n.shape !== 'token' && n.shape !== 'constants')
    list(n.shape === 'logit' ? 'Who wrote it' : 'What it read (value edges)', n.shape === 'logit' ? 'Value edges into the logit.' : 'Whose write it passed on towards the logit: sums to what it writes.', of(into[state.node], 0), 0, n.totals[0], cards, 0);
  if (n.paid.length) {
    const card = make('section', null, {class: 'card', 'aria-label': 'Where it looked'}, cards);
    make('h3', 'Where it looked', null, card); make('p', 'The attention that it paid from this position.', null, card);
    for (const [p, paid] of n.paid) {
      const row = make('div', null, {class: 'line', 'data-paid': paid}, card), text = make('span', null, null, row);
      make('code', texts.get(p), null, text); text.append(` at ${places.get(p)}`);
      make('i', null, {style: `background:linear-gradient(var(--soft),var(--soft)) 0 0/${100 * paid}% 100% no-repeat`, 'aria-hidden': 'true'}, row);
      make('b', paid.toFixed(3), null, row);
    }
  }
  if (n.shape === 'head') {
    const first = 'Whose write made the attention help the logit (red) or harm it (blue); to first order.';
    list('Why: who wrote its query', first, of(into[state.node], 1), 0, n.totals[1], cards, 1);
    list('Why: who wrote the keys', first, of(into[state.node], 2), 0, n.totals[2], cards, 2);
  }
  if (n.shape !== 'logit') {
    list('Who read it (value edges)', 'Sums to what it writes.', of(outOf[state.node], 0), 1, n.value, cards, 0);
    const asked = outOf[state.node].filter(e => DATA.edges[e][2] > 0);
    if (asked.length) list('Whose attention it moved', 'Heads that read it in their query or key: the largest, to first order.', asked, 1, null, cards, null);
  }
}
/* On paper nothing scrolls: the graph is made as small as the sheet of paper is wide. */
addEventListener('beforeprint', () => { sheet.style.zoom = Math.min(1, 680 / sheet.scrollWidth); });
addEventListener('afterprint', () => { sheet.style.zoom = ''; });
let wide = 0;
new ResizeObserver(() => { if (sheet.clientWidth !== wide) { wide = sheet.clientWidth; arrange(); } }).observe(sheet);
dark.addEventListener('change', draw);
draw(); explain();
document.body.dataset.drawn = performance.now();
