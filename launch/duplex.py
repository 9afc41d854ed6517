"""Plays a sound or clip to a model as if it were live, a unit at a time, and writes down what it says.

  python launch/duplex.py --checkpoint=checkpoints/omni --input=talk.wav --output=out/talk
  python launch/duplex.py --checkpoint=checkpoints/omni --input=clip.mp4 --output=out/clip --text="12:and now?"

A line is printed for every unit, and a last one with figures. --output appears whole or not at all, with
  transcript.json   [{unit, state: "listen" | "speak", text, delegate?, background?}]
  trace.jsonl       a line a unit: everything that went in and came out, speech codes among it (until the voice decoder
                    is here, they are all there is of the voice: no reply.wav yet)
  timeline.png      the session as a picture

Compiled programs are kept in $JAX_COMPILATION_CACHE_DIR, by default ~/.cache/venus_jax: a second run starts soon.
Exit status: 0 done, 1 wrong flags, 2 something that cannot be used (one line says what), 130 interrupted.
"""

import sys

from absl import flags

from venus_jax import cli

FLAGS = flags.FLAGS
flags.DEFINE_string("checkpoint", None, "Checkpoint directory, of either kind (see convert.py).", required=True)
flags.DEFINE_string("input", None, "File to play: wav, flac, mp3, mp4, ...; clips show one frame a second.",
                    required=True)
flags.DEFINE_string("output", None, "Directory to write; must not exist yet, or be empty.", required=True)
flags.DEFINE_string("prompt", None, "System prompt; by default the published one.")
flags.DEFINE_string("voice", None, "File with a reference voice.")
flags.DEFINE_integer("seed", 0, "Seed of all draws.")
flags.DEFINE_bool("greedy", False, "Take the likeliest token and code instead of drawing.")
flags.DEFINE_float("unit_seconds", 1.0, "Length of a unit: 1.0 as published, or 0.5.")
flags.DEFINE_multi_string("text", [], "SECOND:WORDS, typed by the user at that second; may be repeated.")
flags.DEFINE_multi_string("background", [], "SECOND:WORDS, a background reply that comes in then; may be repeated.")
flags.DEFINE_integer("force_listen_units", 0, "Units at the beginning in which the model does not speak.")
flags.DEFINE_integer("max_tokens", 20, "Token budget of a unit, its end included.")
flags.DEFINE_float("temperature", None, "Temperature of the words; by default the published one.")
flags.DEFINE_string("window", "prefix_ring", "What stays in the cache: prefix_ring, ring, error, basic or context.")
flags.DEFINE_integer("slots", None, "Tokens the cache holds; by default 8192, or what the model has room for.")
flags.DEFINE_float("tail", 3.0, "Seconds of silence after the input in which a reply may be finished.")
flags.DEFINE_bool("no_speak", False, "Words only: do not run the talker.")


def main(_):
    from venus_jax.playback import play_file  # after the flags: --help stays quick

    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    cli.compilation_cache()
    settings = dict(greedy=FLAGS.greedy, voice_greedy=FLAGS.greedy, max_tokens=FLAGS.max_tokens,
                    temperature=FLAGS.temperature)
    options = dict(prompt=FLAGS.prompt, slots=FLAGS.slots, speak=False if FLAGS.no_speak else None,
                   settings={name: value for name, value in settings.items() if value is not None})
    play_file(FLAGS.checkpoint, FLAGS.input, FLAGS.output, text=FLAGS.text, background=FLAGS.background,
              tail=FLAGS.tail, voice=FLAGS.voice, seed=FLAGS.seed, unit_seconds=FLAGS.unit_seconds, window=FLAGS.window,
              force_listen_units=FLAGS.force_listen_units, emit=lambda line: print(line, flush=True),
              **{name: value for name, value in options.items() if value is not None})


if __name__ == "__main__":
    cli.run(main)
