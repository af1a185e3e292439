// Browsers refuse workers on pages that were opened from disk. There, the search runs in a hidden frame instead.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.waiting = []
      const begin = () => {
        document.body.append(this.frame)
        const inside = this.frame.contentWindow
        inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
        const script = inside.document.createElement("script")
        script.src = new URL(url, location.href).href
        script.onload = () => {
          for (const data of this.waiting.splice(0)) this.deliver(data)
          this.waiting = null
        }
        inside.document.body.append(script)
      }
      if (document.body) begin()
      else addEventListener("DOMContentLoaded", begin)
    }
    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.deliver(data)
    }
    deliver(data) {
      const inside = this.frame.contentWindow
      inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }
    terminate() {
      this.frame.remove()
    }
  }
