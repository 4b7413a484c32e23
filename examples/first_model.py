# %% [markdown]
# # A first model, in a minute on a CPU
#
# Prepare a text, train a tiny model on it, look at its loss, interrupt and resume it, and let it write.
# Run the cells one by one in an editor or a notebook, or all at once: python examples/first_model.py

# %%
import random
from pathlib import Path

import gptmill

# %% [markdown]
# ## A text
# Any text file will do. This one is generated, so that the example brings its own: sentences of a tiny grammar, which
# a tiny model can learn.

# %%
text = Path("animals.txt")
if not text.exists():
    generator = random.Random(0)
    animals, verbs = "fox dog hen cat owl".split(), "sees hears follows finds likes".split()
    words = (animals, verbs, animals)
    sentences = ("the {} {} the {}.\n".format(*map(generator.choice, words)) for _ in range(4000))
    text.write_text("".join(sentences), encoding="utf-8")

corpus = gptmill.prepare(text, tokenizer="char", out="data/animals", val_fraction=0.1)
print(corpus)
print(next(corpus.documents("val"))[:60])

# %% [markdown]
# ## Train
# Every option of `gptmill train` is a keyword. A wrong one is an error that names the right one.

# %%
config = gptmill.make_config(
    data_dir="data/animals",
    num_layers=2,
    num_heads=2,
    embd_size=32,
    context_length=32,
    total_batch_size=1024,
    mini_batch_size=32,
    max_lr=1e-2,
    warmup_steps=10,
    max_steps=120,
    eval_freq=40,
    eval_tokens=2048,
    checkpoint_freq=20,
    sample_prompt="the fox ",
    device="cpu",
)
run = gptmill.train(config, run_name="animals", resume="auto")
print(run)

# %% [markdown]
# ## The loss curve
# Metrics are NumPy arrays, ready for any plotting library: `plt.plot(run.metrics["step"], run.metrics["loss"])`.

# %%
steps, losses = run.metrics["step"], run.metrics["loss"]
for step, loss in zip(steps[::20], losses[::20], strict=True):
    print(f"{step:>4}  {loss:.3f}  {'#' * round(10 * loss)}")
print("validation:", run.evaluations["val_loss"].round(3))

# %% [markdown]
# ## Interrupt and resume
# Press the stop button while `train` runs: it saves a checkpoint and returns. One line goes on, with the same numbers
# as without the break. A finished run stays as it is. After `kill -9`, run this file again: `resume="auto"` goes on.

# %%
run = gptmill.resume("animals")
print(run)
print([checkpoint.step for checkpoint in run.checkpoints])

# %% [markdown]
# ## Let it write, and measure it
# The loss of a text is its mean surprise in nats per token: low for sentences of the grammar, high for others.

# %%
model = run.load(device="cpu")
print(model.generate("the fox ", max_new_tokens=60, temperature=0.5, seed=1))
print(f"{model.loss('the owl likes the hen.'):.2f} nats per token: a sentence of the grammar")
print(f"{model.loss('hen the likes. owl the'):.2f} nats per token: the same words, shuffled")
