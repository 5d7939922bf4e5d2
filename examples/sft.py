"""Fine-tune on conversations: a chat template, a mask of the loss, and packs.

From the repository's root:

    python examples/sft.py          # writes demo_output/sft: conversations, and a tokenizer with a template
    cd demo_output/sft && lightning-streaming convert chats.jsonl train --chat --tokenizer model && cd ../..
    lightning-streaming fit --config configs/sft.yaml

The program takes some seconds on two cores, and the training up to a minute. For data of your own, replace the file and
the folder: conversations are lists of messages with role and content; the folder is that of a model of transformers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the other examples, from any directory
from examples.packed_documents import PackedByteTransformer

TURN, END = "<|turn|>", "<|end|>"
NUM_TOKENS = 258
TEMPLATE = """\
{%- for message in messages %}
{{- '<|turn|>' ~ message.role ~ ': ' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content ~ '<|end|>' }}{% endgeneration %}
{%- else %}
{{- message.content ~ '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant: ' }}{% endif %}
"""


class ChatTransformer(PackedByteTransformer):
    """Next-token prediction of the labels of packs: {"input_ids", "labels", ...}, each of shape (packs, capacity)."""

    def __init__(self, width: int = 64, learning_rate: float = 3e-3) -> None:
        super().__init__(context=256, width=width, learning_rate=learning_rate)
        self.embedding, self.head = nn.Embedding(NUM_TOKENS, width), nn.Linear(width, NUM_TOKENS)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["input_ids"], batch["position_ids"], batch["document_ids"])
        # A label is the token itself, which the token before it predicts; -100 is ignored.
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def write_model(folder: Path) -> None:
    """Write a tokenizer of bytes and two more tokens, with the files that models of transformers have."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(TURN), AddedToken(END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def write_chats(out: Path, most: int = 3000) -> None:
    """Write conversations about sums, and the model's folder."""
    write_model(out / "model")
    drawn = random.Random(1)
    with (out / "chats.jsonl").open("w") as file:
        for number in range(most):
            messages = [{"role": "system", "content": "Answer briefly."}] if number % 3 else []
            for _ in range(1 + number % 3):
                first, second = drawn.randrange(10), drawn.randrange(10)
                messages.append({"role": "user", "content": f"{first} + {second}?"})
                messages.append({"role": "assistant", "content": f"It is {first + second}."})
            file.write(json.dumps({"messages": messages}) + "\n")


def convert_arguments(out: Path) -> list[str]:
    """Return the arguments of ``lightning-streaming convert`` for these conversations."""
    return [str(out / "chats.jsonl"), str(out / "train"), "--chat", "--tokenizer", str(out / "model")]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/sft"), help="default: %(default)s")
    arguments = parser.parse_args()
    write_chats(arguments.out)
    print(f"{arguments.out}: written. Next: lightning-streaming convert {' '.join(convert_arguments(arguments.out))}")


if __name__ == "__main__":
    main()
