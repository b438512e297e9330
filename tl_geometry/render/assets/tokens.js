/* The text, each token in the colour of its value: fixed values, or those of one map at the chosen query. */
PARTS.tokens = (part, parent) => {
  make(parent, 'h2', part.title);
  const tools = make(parent, 'div', null, {class: 'tools'}), maps = PAGE.parts.find(other => other.kind === 'maps');
  if (!part.values) choose(tools, 'colour by', maps.names, 'source');
  const setScale = scale(tools), strip = make(parent, 'div', null, {class: 'text'});
  const spans = part.texts.map((text, k) => {
    const span = make(strip, 'span', text);
    if (part.values && Math.abs(part.values[k]) > 0.05 * part.limit) make(span, 'small', number(part.values[k], true));
    if (part.breaks[k]) make(strip, 'br');
    span.onclick = () => select(part.values ? {position: k} : {query: k, i: k, j: k, kept: [k, k]});
    return span;
  });
  listeners.push(() => {
    const limit = part.values ? part.limit : maps.limits[state.source];
    setScale(limit, part.values ? true : maps.signed[state.source]);
    spans.forEach((span, k) => {
      const value = part.values ? part.values[k] : state.read(state.source, state.query, k);
      const empty = Number.isNaN(value), colour = shade(empty ? 0 : value, limit);
      Object.assign(span.style, {background: rgb(colour), color: ink(colour)});
      span.className = empty ? 'later' : '';
      span.classList.toggle('here', part.values ? part.mark === k : state.query === k);
      span.title = `${k}: ${part.texts[k]} ${empty ? '' : number(value, true)}`;
    });
  });
};
