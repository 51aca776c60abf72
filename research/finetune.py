"""Run the fine-tuning comparison of `finetuning/`: see README.md."""

from finetuning.command import main

if __name__ == "__main__":
    main()
