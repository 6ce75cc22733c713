'use strict';
(() => {
  const box = document.getElementById('hover');
  // How far from a mark, in pixels, a pointer still means it.
  const reach = 18;
  let shown = null;

  // While our own box is shown, the browser's tooltip is not: the title is taken out of its mark and put back afterwards.
  const hide = () => {
    if (!shown) return;
    shown.mark.prepend(shown.title);
    shown.mark.classList.remove('over');
    shown = null;
    box.hidden = true;
  };
  const show = (mark, x, y) => {
    if (!shown || shown.mark !== mark) {
      hide();
      const title = mark.querySelector('title');
      if (!title) return;
      title.remove();
      mark.classList.add('over');
      box.textContent = title.textContent;
      box.hidden = false;
      shown = { mark, title };
    }
    const { width, height } = box.getBoundingClientRect();
    const left = Math.min(x + 14, document.documentElement.clientWidth - width - 6);
    const top = y + 16 + height < window.innerHeight ? y + 16 : y - height - 12;
    box.style.left = `${Math.max(6, left)}px`;
    box.style.top = `${Math.max(6, top)}px`;
  };
  const nearest = (svg, x, y) => {
    let best = null;
    let least = [reach, Infinity];
    for (const mark of svg.querySelectorAll('.mark')) {
      const r = mark.lastElementChild.getBoundingClientRect();
      const away = Math.hypot(Math.max(r.left - x, 0, x - r.right), Math.max(r.top - y, 0, y - r.bottom));
      const middle = Math.hypot((r.left + r.right) / 2 - x, (r.top + r.bottom) / 2 - y);
      // Of marks at one place the one on top, which is drawn last.
      if (away < least[0] || (away === least[0] && middle <= least[1])) [best, least] = [mark, [away, middle]];
    }
    return best;
  };
  const point = (event) => {
    const svg = event.target instanceof Element && event.target.closest('figure svg');
    const mark = svg && nearest(svg, event.clientX, event.clientY);
    if (mark) show(mark, event.clientX, event.clientY);
    else hide();
  };
  document.addEventListener('pointermove', point);
  document.addEventListener('pointerdown', point);
  document.addEventListener('scroll', hide, { passive: true, capture: true });
  document.documentElement.addEventListener('pointerleave', hide);

  // A drawing that stands alone: what the style sheet says becomes attributes of its elements.
  const kept = ['fill', 'stroke', 'stroke-width', 'stroke-dasharray', 'stroke-linejoin', 'paint-order', 'opacity', 'font-family', 'font-size', 'font-weight', 'text-anchor'];
  const alone = (svg) => {
    const [, , width, height] = svg.getAttribute('viewBox').split(' ').map(Number);
    const copy = svg.cloneNode(true);
    const originals = [svg, ...svg.querySelectorAll('*')];
    [copy, ...copy.querySelectorAll('*')].forEach((element, i) => {
      const style = getComputedStyle(originals[i]);
      if (element.tagName !== 'title') for (const name of kept) element.setAttribute(name, style.getPropertyValue(name));
      element.removeAttribute('class');
    });
    const margin = 12;
    copy.setAttribute('viewBox', `${-margin} ${-margin} ${width + 2 * margin} ${height + 2 * margin}`);
    copy.setAttribute('width', width + 2 * margin);
    copy.setAttribute('height', height + 2 * margin);
    const paper = document.createElementNS('http://www.w3.org/2000/svg', 'rect');
    for (const [name, value] of Object.entries({ x: -margin, y: -margin, width: width + 2 * margin, height: height + 2 * margin, fill: getComputedStyle(document.body).backgroundColor })) paper.setAttribute(name, value);
    copy.prepend(paper);
    return { text: new XMLSerializer().serializeToString(copy), width: width + 2 * margin, height: height + 2 * margin };
  };
  const save = (blob, name) => {
    const url = URL.createObjectURL(blob);
    const link = document.createElement('a');
    link.href = url;
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  };
  const picture = (drawing) => new Promise((resolve, reject) => {
    const url = URL.createObjectURL(new Blob([drawing.text], { type: 'image/svg+xml' }));
    const image = new Image();
    image.onload = () => {
      const scale = 2;
      const canvas = document.createElement('canvas');
      canvas.width = drawing.width * scale;
      canvas.height = drawing.height * scale;
      canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
      URL.revokeObjectURL(url);
      canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error('no picture'))), 'image/png');
    };
    image.onerror = () => reject(new Error('the drawing cannot be read'));
    image.src = url;
  });
  document.addEventListener('click', async (event) => {
    const button = event.target instanceof Element && event.target.closest('button[data-save]');
    if (!button) return;
    hide();
    const drawings = [...button.closest('.panel').querySelectorAll('svg')];
    const svg = drawings.find((s) => getComputedStyle(s).display !== 'none') || drawings[0];
    const drawing = alone(svg);
    const name = `hbmark-${svg.dataset.name}`;
    if (button.dataset.save === 'svg') save(new Blob([drawing.text], { type: 'image/svg+xml' }), `${name}.svg`);
    else save(await picture(drawing), `${name}.png`);
  });
})();
