/* Gives a frame, and the image behind it, the height that the page in it posts. */
window.tlgHears ||= !addEventListener('message', ({data, source}) => {
  if (!(data?.tlgHeight > 0)) return;
  for (const frame of document.querySelectorAll('.tlg-frame > iframe')) {
    if (frame.contentWindow !== source) continue;
    const high = 10 * Math.ceil(data.tlgHeight / 10), image = frame.previousElementSibling;
    frame.style.height = `calc(${high}px + var(--tlg-dark, 0px))`;
    if (image) image.style.maxHeight = `${high}px`;
  }
});
