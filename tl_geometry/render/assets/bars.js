/* What the chosen cell is made of: a bar for each map, the share of each group, other numbers. */
PARTS.bars = (part, parent) => {
  make(parent, 'h2', part.title);
  const list = make(parent, 'div'), made = make(parent, 'div'), more = make(parent, 'div', null, {class: 'numbers'});
  const {names, colours} = PAGE.parts.find(other => other.kind === 'maps');
  listeners.push(() => {
    const value = m => state.read(m, state.i, state.j);
    list.textContent = made.textContent = more.textContent = '';
    bars(list, part.maps.map(m => ({label: names[m], value: value(m), colour: colours[m]})));
    const sums = {};
    for (const [group, m] of part.groups) sums[group] = (sums[group] || 0) + value(m);
    const shares = Object.entries(sums).map(([group, sum]) => [group, Math.abs(sum)]).sort((a, b) => b[1] - a[1]);
    const all = shares.reduce((total, [, size]) => total + size, 0);
    if (all > 0) {
      const strip = make(made, 'div', null, {class: 'made'});
      for (const [group, size] of shares) make(strip, 'i', null, {style: `flex:${size / all};background:${part.colours[group]}`, title: group});
      make(made, 'p', `This score is made of ${shares.map(([group, size]) => `${group} ${Math.round(100 * size / all)}%`).join(', ')} (of absolute values).`);
    }
    for (const [name, grid] of part.words) make(make(more, 'span', name), 'b', grid[state.i][state.j]);
    for (const m of part.numbers) make(make(more, 'span', names[m]), 'b', number(value(m)), {'data-value': value(m)});
  });
};
