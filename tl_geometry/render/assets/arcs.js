/* A graph: tokens along x, blocks upwards, a mark for each node, a line for each edge; a click lists a node's edges. */
PARTS.arcs = (part, parent) => {
  const {nodes, edges} = part, count = nodes.name.length, LEFT = 74, WIDE = 35;
  const tools = make(parent, 'div', null, {class: 'tools'}), label = make(tools, 'label', 'nodes shown ');
  const range = make(label, 'input', null, {type: 'range', min: 2, max: count, 'aria-label': 'nodes shown'});
  const said = make(tools, 'b'), sheet = make(parent, 'div', null, {class: 'sheet'});
  const head = make(parent, 'h2', null, {style: 'margin-top:12px'}), cards = make(parent, 'div', null, {class: 'cards'});
  range.oninput = () => select({shown: +range.value, node: state.node < range.value ? state.node : 0});
  const token = position => part.texts[position] ?? '';
  const named = k => nodes.position[k] < 0 ? nodes.name[k] : `${nodes.name[k]} at ${nodes.position[k]} “${token(nodes.position[k])}”`;
  const largest = list => Math.max(...list.map(Math.abs), 1e-300);
  const DASHES = {value: '', query: '7 4', key: '2 4'};

  /* Where each shown node stands: nodes of one position and row side by side, columns as wide as these. */
  function places() {
    const kept = [...Array(state.shown).keys()];
    const columns = [...new Set(kept.map(k => nodes.position[k]))].sort((a, b) => (a < 0) - (b < 0) || a - b);
    const rows = [...new Set(kept.map(k => nodes.row[k]))].sort((a, b) => b - a);
    const cell = (x, y) => kept.filter(k => nodes.position[k] === x && nodes.row[k] === y);
    const place = [], middles = [], step = Math.max(20, Math.min(30, 640 / rows.length));
    let left = 0;
    for (const x of columns) {
      const width = 14 + WIDE * Math.max(...rows.map(y => cell(x, y).length));
      rows.forEach((y, n) => cell(x, y).forEach((k, m, all) => { place[k] = [left + width * (m + 0.5) / all.length, 20 + step * n]; }));
      middles.push(left + width / 2);
      left += width;
    }
    return {kept, columns, rows, place, middles, step, width: left + 8, height: step * rows.length + 46};
  }

  function draw() {
    const {kept, columns, rows, place, middles, step, width, height} = places(), thick = largest(edges.value), top = largest(nodes.value);
    sheet.textContent = '';
    const names = pen(sheet, 'svg', {width: LEFT, height, class: 'rows'}), svg = pen(sheet, 'svg', {width, height, role: 'group', 'aria-label': 'graph'});
    rows.forEach((row, n) => pen(names, 'text', {x: LEFT - 8, y: 24 + step * n, 'text-anchor': 'end'}, row === Math.max(...nodes.row) ? (part.exact ? 'difference' : 'logit') : row ? `${row % 2 ? 'block' : 'MLP'} ${(row - 1) >> 1}` : 'embedding'));
    columns.forEach((x, n) => {
      const text = x < 0 ? 'no' : token(x), middle = {x: middles[n], 'text-anchor': 'middle'};
      pen(svg, 'text', {...middle, y: height - 22}, text.length > 7 ? `${text.slice(0, 6)}…` : text);
      pen(svg, 'text', {...middle, y: height - 8}, x < 0 ? 'position' : x);
    });
    edges.value.forEach((value, e) => {
      const ends = [edges.source[e], edges.target[e]], own = ends.includes(state.node);
      if (ends.some(k => k < 0 || k >= state.shown) || edges.type[e] !== 'value' && !own) return;
      const [[x, y], [u, v]] = ends.map(k => place[k]), middle = (y + v) / 2;
      const look = {class: 'edge', style: `stroke:${sign(value)}`, 'stroke-opacity': own ? 0.95 : 0.25, 'stroke-dasharray': DASHES[edges.type[e]]};
      const line = pen(svg, 'path', {...look, 'stroke-width': 0.6 + 5 * Math.abs(value) / thick, d: `M${x} ${y}C${x} ${middle} ${u} ${middle} ${u} ${v}`});
      pen(line, 'title', {}, `${named(ends[0])} → ${named(ends[1])}, ${edges.type[e]}: ${number(value, true)}`);
    });
    for (const k of kept) {
      const [x, y] = place[k], r = 3.5 + (step / 2 - 7) * Math.sqrt(Math.abs(nodes.value[k]) / top), kind = nodes.kind[k];
      const group = pen(svg, 'g', {class: 'node', tabindex: 0, role: 'button', 'aria-pressed': k === state.node, 'aria-label': named(k)});
      const corners = kind === 'mlp' ? [[-r, -r], [r, -r], [r, r], [-r, r]] : [[0, -1.3 * r], [1.3 * r, 0], [0, 1.3 * r], [-1.3 * r, 0]];
      const look = {class: 'body', style: `fill:${sign(nodes.value[k])}`};
      if (kind === 'head') pen(group, 'circle', {...look, cx: x, cy: y, r});
      else pen(group, 'polygon', {...look, points: corners.map(([a, b]) => [x + a, y + b].join()).join(' ')});
      if (kind === 'head') pen(group, 'text', {x: x + r + 3, y: y + 4, class: 'name'}, `H${nodes.head[k]}`);
      pen(group, 'title', {}, `${named(k)}: ${number(nodes.value[k], true)}`);
      group.onclick = () => select({node: k});
      group.onkeydown = event => { if (event.key === 'Enter') select({node: k}); };
    }
    const seen = sheet.clientWidth - LEFT, at = place[state.node][0] - sheet.scrollLeft;
    if (at < 12 || at > seen - 12) sheet.scrollLeft += at - seen / 2;
  }

  /* The edges of one type at one side of the node, the largest first; source -1 is all that is not listed. */
  function list(title, side, type) {
    const other = side === 'target' ? 'source' : 'target', size = e => edges.source[e] < 0 ? 1 : -Math.abs(edges.value[e]);
    const mine = [...edges.value.keys()].filter(e => edges[side][e] === state.node && edges.type[e] === type).sort((a, b) => size(a) - size(b));
    if (!mine.length) return;
    const card = make(cards, 'div');
    make(card, 'h3', title);
    bars(card, mine.slice(0, part.listed + 1).map(e => {
      const node = edges[other][e], value = edges.value[e];
      return node < 0 ? {label: 'everything else', value} : {label: named(node), value, go: () => select({node})};
    }));
  }

  listeners.push(change => {
    const at = nodes.position.indexOf(change.position);
    if (at >= 0) state.node = at;
    range.value = state.shown = Math.max(state.shown, state.node + 1);
    said.textContent = `${state.shown} of ${count}`;
    draw();
    const k = state.node, moved = nodes.moved[k];
    const attention = moved === null ? '' : `; the attention that it moves is worth ${number(moved, true)}, to first order`;
    head.textContent = `${named(k)} ${nodes.kind[k] === 'target' ? 'is' : 'wrote'} ${number(nodes.value[k], nodes.kind[k] !== 'target')}${attention}`;
    cards.textContent = '';
    list('What it read as values', 'target', 'value');
    list('Who wrote its query', 'target', 'query');
    list('Who wrote its keys', 'target', 'key');
    list('Who read it as a value', 'source', 'value');
    list('Whose query it wrote', 'source', 'query');
    list('Whose keys it wrote', 'source', 'key');
  });
};
