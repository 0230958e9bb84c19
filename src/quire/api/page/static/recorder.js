// Sound from the microphone, as a WAV file.

import { announce, icon, iconButton } from "./dom.js";

const RATE = 16_000; // samples a second: what models of speech hear
const LONGEST_S = 300;

export class Recorder {
  /** Browsers lend the microphone to pages of this machine, or that came by HTTPS. */
  static offered = Boolean(navigator.mediaDevices?.getUserMedia) && "MediaRecorder" in globalThis;

  /** `done` gets the file, `failed` why there is none. */
  constructor(done, failed) {
    this.done = done;
    this.failed = failed;
    this.node = iconButton("mic", "Record sound", () => (this.running ? this.running.stop() : this.begin()), { hidden: true, "aria-pressed": "false" });
  }

  async begin() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true }).catch(() => null);
    if (!stream) {
      this.failed("The browser does not lend the microphone to this page.");
      return;
    }
    const pieces = [];
    this.running = new MediaRecorder(stream);
    this.running.ondataavailable = ({ data }) => pieces.push(data);
    this.running.onstop = () => this.end(stream, pieces);
    this.running.start();
    this.timer = setTimeout(() => this.running?.stop(), 1000 * LONGEST_S);
    this.show(true);
  }

  async end(stream, pieces) {
    clearTimeout(this.timer);
    for (const track of stream.getTracks()) track.stop();
    this.running = null;
    this.show(false);
    try {
      const name = `recording-${new Date().toISOString().slice(0, 19).replaceAll(":", "-")}.wav`;
      this.done(new File([await wav(new Blob(pieces))], name, { type: "audio/wav" }));
    } catch {
      this.failed("The recording cannot be read.");
    }
  }

  show(runs) {
    const label = runs ? "Stop recording" : "Record sound";
    this.node.replaceChildren(icon(runs ? "stop" : "mic"));
    this.node.title = this.node.ariaLabel = label;
    this.node.ariaPressed = String(runs);
    announce(runs ? "Recording." : "Recorded.");
  }
}

/** A recording of any format that the browser reads as a WAV file: one channel, 16 bits. */
async function wav(blob) {
  const context = new OfflineAudioContext(1, 1, RATE);
  const sound = await context.decodeAudioData(await blob.arrayBuffer());
  const whole = new OfflineAudioContext(1, Math.ceil(sound.duration * RATE), RATE);
  const source = whole.createBufferSource();
  source.buffer = sound;
  source.connect(whole.destination);
  source.start();
  const samples = (await whole.startRendering()).getChannelData(0);
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const words = (at, text) => [...text].forEach((char, index) => view.setUint8(at + index, char.charCodeAt(0)));
  words(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  words(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true); // bytes a second
  view.setUint16(32, 2, true); // bytes a frame
  view.setUint16(34, 16, true); // bits a sample
  words(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, index) => view.setInt16(44 + 2 * index, 32767 * Math.max(-1, Math.min(1, sample)), true));
  return view.buffer;
}
