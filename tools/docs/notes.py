"""What to do about messages that do not say it themselves; every line of the log has a note."""

_REPORT = "A defect. The log has the traceback; please report it."
_DAMAGED = "The disk, or another program, changed a file. If it happens again, check the disk."

NOTES: dict[str, str] = {
    "kvpersist: … is not warmed: …": "A file of `--kvpersist-warm`. The end of the line says why; "
    "`mlx-lm-kvpersist warm` tries again.",
    "an interrupted reply could not be saved": "The next prompt of its conversation computes it "
    "again. Most often for want of memory.",
    "prompts failed together and are tried by themselves: …": "One call for several prompts "
    "failed, often for want of memory. Each is computed by itself; one that fails again ends with "
    "an error.",
    "a request failed": "It ended with an error, most often for want of memory: a smaller "
    "`--kvpersist-ram`, `--decode-concurrency` or context helps. The server goes on.",
    "a connection failed": "One request had no answer. " + _REPORT,
    "a reply failed": "One request ended with status 500. The traceback says why.",
    "… … failed: …": "A route ended with status 500, or its answer broke off, as an export does "
    "whose session is deleted. If a traceback follows: " + _REPORT,
    "plugin … in hook … …; ignored": "For its author: the server cannot use the plugin's answer, "
    "or the plugin changed what it was given. The server goes on without it.",
    "plugin … failed in hook …; ignored": "For its author: the log has the traceback. The server "
    "goes on without it. The same failure is logged once an hour, with its number.",
    "kvpersist: attention over quantized keys fails: …": "The server serves the model as stock "
    "does, and keeps nothing. " + _REPORT,
    "kvpersist: packed attention over … keys is wrong on …: all layers dequantize": "MLX's "
    "result for packed keys differs from plain arithmetic on this device. Replies are right; "
    "decoding is slower.",
    "the generation thread ended": "The process ends with status 1; a service starts it again. "
    + _REPORT,
    "kvpersist: the prompt could not be looked up": "The prompt was computed. " + _REPORT,
    "kvpersist: a rank could not restore": "All ranks computed the prompt. " + _REPORT,
    "kvpersist: what is stored could not be looked up": "All ranks computed the prompt. " + _REPORT,
    "kvpersist: the prompt could not be restored": "The prompt was computed. " + _REPORT,
    "kvpersist: a turn could not be saved": "The turn is computed again next time. " + _REPORT,
    "kvpersist: a turn of the draft model could not be saved": "The draft model computes the turn "
    "again next time. " + _REPORT,
    "kvpersist: served as stock does, nothing is kept: …": "The end of the line says why: see "
    '"A model is not kept" below.',
    "kvpersist: this tokenizer's prompts are matched by ids, not by text": "Less is found again "
    "after a sampled reply. Nothing to do.",
    "kvpersist: no facts ship about the architecture of …: each prompt is computed alone, "
    "attention dequantizes, and each restore is checked as far as caches can step back": "The "
    "model has code of its own, or this version of mlx-lm or the architecture is newer than the "
    "package. Some requests are slower. An upgrade of the package may know the architecture.",
    "kvpersist: … of its layers stay in full precision: …": "They take more memory and disk; all "
    "else works. The end of the line says why.",
    "… goes to quarantine: …": f"Its tokens are computed again. {_DAMAGED}",
    "… turns or checkpoints (…) were not written within … s; they are computed again when needed": (
        "The server ended while the disk was slow."
    ),
    "a turn is not saved: …, which it needs, …": "The end of the line says why. The turn stays in "
    "RAM; the next turn of its conversation is saved whole.",
    "the store … is being changed by …; turns stay in memory until that has ended": "Nothing to "
    "do, if the process is one of yours: new turns are written when it has ended.",
    "cannot …: …; serving goes on from memory": "The disk is full, not writable, or a budget is "
    "used up. Turns are kept in RAM only. It is said once, until a write succeeds.",
    "the index of … was removed or replaced; it is opened anew": "Somebody deleted the folder "
    "under a running server, or `store rebuild` replaced a damaged index. What is in "
    "RAM stays usable.",
    "the index of the store is damaged (…); it is rebuilt": "From the files; sessions without a "
    f"name or pin lose their entry. {_DAMAGED}",
    "… is not kept aside: …": "A damaged file was deleted instead of moved to quarantine.",
    "others may look into the store … (mode …): chmod 700 it": "The folder was there with these "
    "rights before; they are not changed for you.",
    "the shared store cannot be …: …; serving goes on": "It is tried again every 10 s, and nothing "
    "waits for it. The end of the line says why: a folder that hangs has not answered for 9 s. See "
    "[A shared cache](shared-cache.md).",
    "…: it is tried less often": "Computing was quicker than fetching. Nothing to do; a store that "
    "is nearer helps.",
    "an object cannot be put into the shared store: …": "Three attempts failed while the store "
    "answered. The object is left out until its conversation goes on. The line ends with the "
    "reason.",
    "the shared store's size cannot be kept: …": "The server may not list or delete objects. Use "
    "`store prune` elsewhere, or the bucket's lifecycle.",
    "the shared store has a damaged object: …": "It is computed again and replaced. If it happens "
    "again, somebody changes objects, or has another key under the same names.",
    "… objects were not put into the shared store": "The server ended before. Others compute them.",
    "… is no longer on …": "Something deleted a file of the store. Its tokens are computed again.",
    "prefetching failed; the rest is read when it is needed": _REPORT,
    "… cannot be read now: …": "Too many open files, no permission, no memory, or a failing disk. "
    "Its tokens are computed again, and the file is tried again.",
    "the old index cannot be read (…); it goes to quarantine": _DAMAGED,
    "… files are not taken into the index, such as …": "They are damaged; `store verify --fix` "
    "moves them away.",
    "kvpersist: the model's … leave too little of the device's …; … more are used": "The model "
    "nearly fills the memory. Nothing is refused, but prompts wait for one another, and the "
    "machine may swap: take a smaller model.",
    "the store could not be changed; serving goes on from memory": _REPORT,
}
