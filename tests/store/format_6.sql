-- The tables of an index of format 6, whose order of eviction was another.
CREATE TABLE roots (
    key BLOB PRIMARY KEY,
    about TEXT NOT NULL,
    worth REAL NOT NULL -- seconds to compute a MiB of its blocks
) WITHOUT ROWID;
CREATE TABLE blocks (
    key BLOB PRIMARY KEY,
    parent BLOB NOT NULL,
    root BLOB NOT NULL,
    start INTEGER NOT NULL,
    ids BLOB NOT NULL,
    text TEXT NOT NULL,
    pending BLOB NOT NULL,
    n_bytes INTEGER NOT NULL,
    used REAL NOT NULL,
    worth REAL NOT NULL, -- its root's, times what plugins say
    base REAL NOT NULL, -- its rank without branches
    n_branches INTEGER NOT NULL,
    n_children INTEGER NOT NULL DEFAULT 0,
    model TEXT NOT NULL -- its fingerprint
);
CREATE INDEX blocks_by_text ON blocks (parent, text);
CREATE INDEX blocks_by_ids ON blocks (parent, ids);
CREATE INDEX blocks_by_use ON blocks (used);
CREATE INDEX leaves_by_use ON blocks (model, used, start DESC, key) WHERE n_children = 0;
CREATE INDEX leaves_by_rank ON blocks (model, base + worth * min(3, n_branches), used, start DESC, key) WHERE n_children = 0;
CREATE TABLE checkpoints (
    key BLOB PRIMARY KEY,
    block BLOB NOT NULL,
    kind TEXT NOT NULL,
    n_tokens INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL,
    used REAL NOT NULL,
    worth REAL NOT NULL, -- twice its block's
    base REAL NOT NULL,
    n_branches INTEGER NOT NULL, -- uses
    root BLOB NOT NULL,
    model TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX checkpoints_by_block ON checkpoints (block, kind, n_tokens, n_bytes);
CREATE INDEX checkpoints_by_use ON checkpoints (used);
CREATE INDEX checkpoints_of_model_by_use ON checkpoints (model, used, key, block);
CREATE INDEX checkpoints_of_model_by_rank ON checkpoints (model, base + worth * min(3, n_branches), used, key, block);
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    root BLOB NOT NULL,
    name TEXT,
    leaf BLOB NOT NULL,
    n_tokens INTEGER NOT NULL,
    pinned INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    used REAL NOT NULL,
    sidecar_bytes INTEGER NOT NULL
);
CREATE INDEX sessions_by_name ON sessions (root, name, used);
CREATE INDEX sessions_by_leaf ON sessions (leaf);
CREATE TABLE replies (
    root BLOB NOT NULL,
    digest BLOB NOT NULL,
    ids BLOB NOT NULL,
    used REAL NOT NULL,
    PRIMARY KEY (root, digest)
) WITHOUT ROWID;
CREATE INDEX replies_by_use ON replies (used);
CREATE TABLE state (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE writes (
    minute INTEGER PRIMARY KEY,
    n_bytes INTEGER NOT NULL
);
CREATE TABLE requests (
    number INTEGER PRIMARY KEY,
    about TEXT NOT NULL
);
CREATE TABLE totals ( -- by root; the empty root stands for all
    root BLOB PRIMARY KEY,
    n_blocks INTEGER NOT NULL,
    block_bytes INTEGER NOT NULL,
    n_checkpoints INTEGER NOT NULL,
    checkpoint_bytes INTEGER NOT NULL,
    sidecar_bytes INTEGER NOT NULL -- for all roots together
) WITHOUT ROWID;
CREATE INDEX totals_by_bytes ON totals (block_bytes);
CREATE TRIGGER block_added AFTER INSERT ON blocks BEGIN
    INSERT INTO totals SELECT new.root, 0, 0, 0, 0, 0
        WHERE NOT EXISTS (SELECT 1 FROM totals WHERE root = new.root);
    UPDATE totals SET n_blocks = n_blocks + 1, block_bytes = block_bytes + new.n_bytes
        WHERE root IN (x'', new.root);
    UPDATE blocks SET n_children = n_children + 1 WHERE key = new.parent;
    UPDATE blocks SET n_children = (SELECT count(*) FROM blocks WHERE parent = new.key)
        WHERE key = new.key AND EXISTS (SELECT 1 FROM blocks WHERE parent = new.key);
END;
CREATE TRIGGER block_resized AFTER UPDATE OF n_bytes ON blocks BEGIN
    UPDATE totals SET block_bytes = block_bytes + new.n_bytes - old.n_bytes
        WHERE root IN (x'', new.root);
END;
CREATE TRIGGER block_removed AFTER DELETE ON blocks BEGIN
    UPDATE totals SET n_blocks = n_blocks - 1, block_bytes = block_bytes - old.n_bytes
        WHERE root IN (x'', old.root);
    UPDATE blocks SET n_children = n_children - 1 WHERE key = old.parent;
END;
CREATE TRIGGER checkpoint_added AFTER INSERT ON checkpoints BEGIN
    INSERT INTO totals SELECT new.root, 0, 0, 0, 0, 0
        WHERE NOT EXISTS (SELECT 1 FROM totals WHERE root = new.root);
    UPDATE totals SET n_checkpoints = n_checkpoints + 1,
        checkpoint_bytes = checkpoint_bytes + new.n_bytes
        WHERE root IN (x'', new.root);
END;
CREATE TRIGGER checkpoint_resized AFTER UPDATE OF n_bytes ON checkpoints BEGIN
    UPDATE totals SET checkpoint_bytes = checkpoint_bytes + new.n_bytes - old.n_bytes
        WHERE root IN (x'', new.root);
END;
CREATE TRIGGER checkpoint_removed AFTER DELETE ON checkpoints BEGIN
    UPDATE totals SET n_checkpoints = n_checkpoints - 1,
        checkpoint_bytes = checkpoint_bytes - old.n_bytes
        WHERE root IN (x'', old.root);
END;
CREATE TRIGGER root_removed AFTER UPDATE ON totals
WHEN new.root != x'' AND new.n_blocks <= 0 AND new.n_checkpoints <= 0 BEGIN
    DELETE FROM totals WHERE root = new.root;
    DELETE FROM roots WHERE key = new.root;
END;
CREATE TRIGGER session_added AFTER INSERT ON sessions BEGIN
    UPDATE totals SET sidecar_bytes = sidecar_bytes + new.sidecar_bytes WHERE root = x'';
END;
CREATE TRIGGER session_removed AFTER DELETE ON sessions BEGIN
    UPDATE totals SET sidecar_bytes = sidecar_bytes - old.sidecar_bytes WHERE root = x'';
END;
