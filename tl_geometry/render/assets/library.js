/* Another library draws into the page; its script lies deflated beside the data, and runs by its hash. */
async function load(parent) {
  const figure = make(parent, 'div', null, {id: 'figure'}), code = document.createElement('script');
  code.textContent = await inflate(PAGE.library).text();
  document.head.append(code);
  return figure;
}
PARTS.circuitsvis = async (part, parent) => {
  await load(parent);
  CircuitsVis.render('figure', CircuitsVis[part.component], part.props);
  scale(make(parent, 'div', null, {class: 'tools'}), 'light')(part.limit, part.signed);
};
PARTS.plotly = async (part, parent) => {
  const figure = await load(parent);
  await Plotly.newPlot(figure, part.figure.data, part.figure.layout, {...part.figure.config, responsive: true});
};
