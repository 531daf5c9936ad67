/* Search on pages that are opened from the disk: there, browsers start no Worker, so that its script runs in a hidden
 * frame. The theme's plugin `offline` loads a shim from the net where no file of this name is among the polyfills. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow, page = inside.document;
      page.open(); // what Firefox loads into a new frame a little later is not wanted
      page.write("<!doctype html><title>search</title><body></body>");
      page.close();
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise(done => {
        const script = page.createElement("script");
        script.src = new URL(url, document.baseURI).href;
        script.onload = done;
        script.onerror = () => this.dispatchEvent(new Event("error"));
        page.body.appendChild(script);
      });
    }

    postMessage(data) {
      const text = JSON.stringify(data); // as a Worker does, the frame gets a copy, with objects of its own
      this.loaded.then(() => {
        const inside = this.frame.contentWindow;
        inside.dispatchEvent(new inside.MessageEvent("message", { data: inside.JSON.parse(text) }));
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
}
