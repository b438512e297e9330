"""Views of results. Each function returns an object that shows itself in Jupyter and saves itself as HTML, PNG, SVG or PDF."""
