// Search without a server. Browsers refuse to start a worker for a page that was opened from the
// file system, so there the script of the worker runs in a hidden frame, and messages are passed on.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      this.world = frame.contentWindow;
      this.world.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      const script = this.world.document.createElement("script");
      script.src = new URL(url, location.href).href;
      this.ready = new Promise((done) => script.addEventListener("load", done));
      this.world.document.body.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.world.dispatchEvent(new this.world.MessageEvent("message", { data })));
    }

    terminate() {
      this.world.frameElement?.remove();
    }
  };
}
