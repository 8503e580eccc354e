// Tables that are wider than the page scroll; a keyboard must reach what scrolls.
function reachScrolling() {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}

document$.subscribe(() => requestAnimationFrame(reachScrolling));
addEventListener("resize", reachScrolling);
