/* A list of the site's versions in the sidebar, where versions.json beside their folders names more than one. */
addEventListener('DOMContentLoaded', async () => {
  if (location.protocol === 'file:') return;
  const root = new URL(document.documentElement.dataset.content_root, location);
  const answer = await fetch(new URL('../versions.json', root)).catch(() => null);
  const versions = answer && answer.ok ? await answer.json() : [];
  if (versions.length < 2) return;
  const list = document.createElement('select');
  list.setAttribute('aria-label', 'version');
  for (const name of versions) list.add(new Option(name, name, false, root.pathname.endsWith(`/${name}/`)));
  list.onchange = () => { location.href = new URL(`../${list.value}/`, root); };
  document.querySelector('.sidebar-brand').after(list);
});
