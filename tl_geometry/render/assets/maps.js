/* Linked heat maps [row map i j]: all maps of the chosen row side by side, or one chosen map. */
PARTS.maps = async (part, parent) => {
  const [, M, I, J] = part.shape, values = await halves(part.packed), [down, across] = part.axes;
  state.read = (m, i, j) => values[((state.row * M + m) * I + i) * J + j] * part.units[state.row][m];
  const tools = make(parent, 'div', null, {class: 'tools'});
  if (part.rows.length > 1) choose(tools, 'head', part.rows, 'row');
  if (!part.together) choose(tools, 'number', part.names, 'map');
  const setScale = scale(tools), where = make(parent, 'div', null, {class: 'where', 'aria-live': 'polite'});
  const grid = make(parent, 'div', null, {class: part.together ? 'maps' : ''});
  const panels = (part.together ? part.names : ['']).map((_, k) => panel(() => part.together ? k : state.map));
  listeners.push(change => {
    const heads = part.rows[state.row] ? [part.rows[state.row]] : [];
    const first = part.together ? 0 : state.map, value = part.together ? [] : [`${part.names[first]} ${number(state.read(first, state.i, state.j))}`];
    where.textContent = [...heads, `${down} ${part.labels[0][state.i]}`, `${across} ${part.labels[1][state.j]}`, ...value].join(' · ');
    setScale(part.limits[first], part.together ? part.signed.some(Boolean) : part.signed[first]);
    for (const draw of panels) draw('row' in change || 'map' in change);
  });

  function panel(map) {
    const box = make(grid, 'figure', null, {class: 'map'}), title = make(box, 'figcaption');
    const most = part.together ? '' : `max-width:${Math.max(J * 54, 160)}px;`;
    const frame = make(box, 'div', null, {class: 'frame', style: most + (part.together ? `aspect-ratio:${J}/${I}` : `height:${I * 22}px`)});
    const label = `${down} downwards, ${across} across: arrow keys move, Enter keeps`;
    const canvas = make(frame, 'canvas', null, {width: J, height: I, tabindex: 0, role: 'application', 'aria-label': label});
    const numbered = !part.together && I * J <= 160, columns = `grid-template:repeat(${I},1fr)/repeat(${J},1fr)`;
    const cells = make(frame, 'div', null, {class: 'cells', style: columns}), mark = make(frame, 'i', null, {class: 'mark'});
    ticks(make(box, 'div', null, {class: 'down'}), part.labels[0], 'top');
    const below = make(box, 'div', null, {class: 'across', style: most});
    ticks(below, part.labels[1], 'left');
    make(below, 'em', `${down} ↓  ${across} →`);
    const at = (i, j) => select({i: Math.max(0, Math.min(I - 1, i)), j: Math.max(0, Math.min(J - 1, j))});
    canvas.onpointermove = event => {
      const r = canvas.getBoundingClientRect();
      at(Math.floor((event.clientY - r.top) / r.height * I), Math.floor((event.clientX - r.left) / r.width * J));
    };
    canvas.onpointerleave = () => at(...state.kept);
    canvas.onclick = () => select({kept: [state.i, state.j], query: state.i});
    canvas.onkeydown = event => {
      const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
      if (event.key === 'Enter') canvas.onclick();
      if (!step) return;
      event.preventDefault();
      at(state.i + step[0], state.j + step[1]);
    };
    return repaint => {
      const place = {left: state.j / J, top: state.i / I, width: 1 / J, height: 1 / I};
      for (const [side, u] of Object.entries(place)) mark.style[side] = `${100 * u}%`;
      if (!repaint) return;
      const m = map(), image = new ImageData(J, I);
      title.textContent = cells.textContent = '';
      if (part.colours[m]) make(title, 'i', null, {class: 'key', style: `background:${part.colours[m]}`});
      title.append(part.names[m]);
      for (let i = 0; i < I; i++) for (let j = 0; j < J; j++) {
        const value = state.read(m, i, j), empty = Number.isNaN(value), colour = shade(empty ? 0 : value, part.limits[m]);
        image.data.set(empty ? [128, 128, 128, 40] : [...colour, 255], 4 * (i * J + j));
        if (numbered) make(cells, 'span', empty ? '' : number(+value.toPrecision(2)), {style: empty ? '' : `color:${ink(colour)}`});
      }
      canvas.getContext('2d').putImageData(image, 0, 0);
    };
  }

  /* At most eight labels along an axis. */
  function ticks(box, labels, side) {
    const step = Math.ceil(labels.length / 8);
    labels.forEach((text, k) => {
      if (k % step === 0) make(box, 'span', text.split(' ')[0], {style: `${side}:${100 * (k + 0.5) / labels.length}%`});
    });
  }
};
