"""Train a small Llama with Hugging Face's Trainer, sharded: the line is `install()`.

torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --output FOLDER
torchrun --standalone --nproc-per-node 3 examples/hf_trainer.py --output FOLDER --resume --steps 9

The second command goes on where the first one has saved, with another number of ranks.
"""

import argparse
import os

import penstock.accelerate
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

TEXT = "Water that falls from a height turns the wheel below. " * 40
SEQUENCE = 16
BATCHES = 6  # of two sequences each, in every step


def build():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def add_lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=4))


def read():
    letters = torch.tensor([ord(letter) for letter in TEXT])
    pieces = letters[: len(letters) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def make_trainer(output, *, lora=False, steps=6, **more):
    """Prepare a training; `more` goes to TrainingArguments."""
    model = add_lora(build()) if lora else build()
    arguments = TrainingArguments(
        output_dir=output,
        use_cpu=not torch.cuda.is_available(),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=BATCHES // int(os.environ["WORLD_SIZE"]),
        learning_rate=1e-2,
        save_steps=3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **more,
    )
    data = read()
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:12])


def train(output, *, resume=False, **more):
    trainer = make_trainer(output, **more)
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    trainer.save_model(f"{output}/model")  # whole weights, as without sharding
    return trainer


def generate(trainer, prompt="Water "):
    """Go on with a text; all ranks call this alike."""
    tokens = torch.tensor([[ord(letter) for letter in prompt]], device=trainer.args.device)
    found = trainer.model.generate(tokens, max_new_tokens=8, do_sample=False)
    return "".join(chr(token) for token in found[0])


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true")
    given = vars(parser.parse_args(arguments))
    penstock.accelerate.install()
    trainer = train(given.pop("output"), **given)
    text = generate(trainer)
    if trainer.is_world_process_zero():
        print(text)


if __name__ == "__main__":
    main()
