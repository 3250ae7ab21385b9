"""The text of --help for each action of `ingot ckpt`: what it does, and what it removes."""

ABOUT = {
    "ls": "List the checkpoints and the saves of the weights alone, on the disk and in the store: step, layout,\n"
    "size, when they were verified, and which one training resumes from. Reads manifests and listings alone.\n"
    "Removes nothing.",
    "verify": "Read every byte of the checkpoints on this machine, compare it with the hashes in the manifest, and\n"
    "say where training resumes; with --store also those in the store. Exit code 21 if a byte differs or a\n"
    "file is lost. Removes nothing.",
    "diff": "Compare two saves, of one run or of two: settings, layout, and every parameter. Removes nothing.",
    "prove": "Prove from the ledger that the run consumed every sample of its order exactly once per epoch.\n"
    "Removes nothing.",
    "repair": "Compute damaged or missing files of the ledger again from the order of samples, and write those that\n"
    "get the hash in the checkpoint. Replaces damaged ledger files, and removes nothing else. Damaged tensors\n"
    "come back with ingot ckpt fetch.",
    "push": "Verify a checkpoint on the disk, and upload it to the store of the run (checkpoint.remote.url), also\n"
    "while the run trains. If the store has it, its bytes are compared, and damaged ones are sent again.\n"
    "Removes nothing, except an older save of the same step, which it replaces.",
    "fetch": "Fetch a checkpoint from the store of the run, every byte compared with its hash. Replaces the local\n"
    "checkpoint of this step, and removes what killed saves left. Refused while the run trains.",
    "pin": "Keep a checkpoint for ever: neither training nor ingot ckpt prune removes it, on the disk and in the\n"
    "store. Removes nothing.",
    "unpin": "Remove the pin of a checkpoint. The checkpoint itself goes when the rules of the run file no longer\n"
    "keep it.",
    "rewind": "Go back by hand: the next ingot train RUN continues from the checkpoint of this step, whose bytes\n"
    "are compared. Newer ones go to RUN/set-aside, and their copies in the store lose their manifests. The guard\n"
    "forgets what it did after the step. Removes nothing from the disk. Refused while the run trains.",
    "prune": "Remove the checkpoints that the rules of the run file do not keep (checkpoint.keep, keep_every,\n"
    "weights_keep, and those of checkpoint.remote), from the disk and from the store. Pinned ones and the\n"
    "newest sound one stay. --dry-run shows what stays and why.",
    "gc": "Remove what belongs to no checkpoint, from the disk and from the store: what killed saves, fetches and\n"
    "uploads left, and samples that no checkpoint lists. Every complete checkpoint stays. --dry-run shows\n"
    "what goes.",
    "reshard": "Write a checkpoint as if it had been saved in another layout, into the new run folder OUT, from\n"
    "which training continues; each rank then reads its own file only. Every layout loads every checkpoint\n"
    "without this. Removes nothing, and refuses an OUT that exists.",
    "convert": "Write the weights of a checkpoint as a Hugging Face folder, as ingot export does; or make a project\n"
    "whose run starts from the weights of a Hugging Face folder, as ingot init --init does. Removes nothing,\n"
    "and refuses an OUT that exists.",
    "import": "Write the weights in a folder of torch.distributed.checkpoint (torchtitan, FSDP scripts) as a Hugging\n"
    "Face folder, without executing its pickles. The moments of an optimizer are not imported. Removes\n"
    "nothing, and refuses an OUT that exists.",
    "export": "Write the weights of a checkpoint, and with --optimizer the state of AdamW, as a folder of\n"
    "torch.distributed.checkpoint for torchtitan or a script with FSDP. Needs a few times the memory of the largest\n"
    "tensor; each is read back and compared. Removes nothing, and refuses an OUT that exists.",
}
