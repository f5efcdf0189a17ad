package auditlog

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
)

// checkpointDomain is the prefix of the signed bytes, so that a signature over anything else is not valid for a
// checkpoint.
const checkpointDomain = "gpuaas-mesh audit checkpoint 1\x00"

// CheckpointKeys are the keys that sign and verify checkpoints of the audit log: the assertion keys of this service.
type CheckpointKeys struct {
	Signing ed25519.PrivateKey
	Verify  *pki.KeySet
	// Confirmed fails while this replica does not know whether Signing still signs. May be nil.
	Confirmed func() error
}

// checkpoint is a row of audit_checkpoint.
type checkpoint struct {
	Number    int64     `db:"number"`
	Pos       int64     `db:"pos"`
	Hash      []byte    `db:"hash"`
	At        time.Time `db:"at"`
	KeyID     string    `db:"key_id"`
	Signature []byte    `db:"signature"`
}

// signed returns the bytes that a checkpoint's signature covers.
func (c *checkpoint) signed() []byte {
	out := []byte(checkpointDomain)
	out = binary.BigEndian.AppendUint64(out, uint64(c.Number)) // a count of rows
	out = binary.BigEndian.AppendUint64(out, uint64(c.Pos))
	out = binary.BigEndian.AppendUint64(out, uint64(c.At.UnixMicro()))
	return append(out, c.Hash...)
}

// sign signs a checkpoint with the key that signs now.
func (c *checkpoint) sign(keys *CheckpointKeys) {
	public, _ := keys.Signing.Public().(ed25519.PublicKey)
	c.KeyID, c.Signature = pki.KeyID(public), ed25519.Sign(keys.Signing, c.signed())
}

// problem returns why the signature is not valid; empty if it is valid.
func (c *checkpoint) problem(keys *CheckpointKeys) string {
	if keys == nil || keys.Verify == nil {
		return "this replica has no keys to check it with"
	}
	public, ok := keys.Verify.Key(c.KeyID)
	switch {
	case !ok:
		return "it is signed by key " + c.KeyID + ", which is not known any more"
	case !ed25519.Verify(public, c.signed(), c.Signature):
		return "its signature by key " + c.KeyID + " is wrong"
	default:
		return ""
	}
}

var (
	endRow = pg.Define(pg.RoleReadmodel, "auditlog.audit_end_row", `
	SELECT a.number, a.pos, a.hash, mesh.clock() AS at, '' AS key_id, ''::bytea AS signature
	FROM readmodel.audit a JOIN readmodel.audit_head h USING (number, hash)
	WHERE NOT EXISTS (SELECT FROM readmodel.audit_checkpoint c WHERE c.number = a.number)`)
	insertCheckpoint = pg.Define(pg.RoleReadmodel, "auditlog.insert_checkpoint", `
	INSERT INTO readmodel.audit_checkpoint (number, pos, hash, at, key_id, signature) VALUES ($1, $2, $3, $4, $5, $6)
		ON CONFLICT DO NOTHING`)
	checkpointsOfOthers = pg.Define(pg.RoleReadmodel, "auditlog.checkpoints_of_others", `
	SELECT `+pg.Columns[checkpoint]("c")+` FROM readmodel.audit_checkpoint c WHERE c.key_id <> $1 ORDER BY c.number
		LIMIT 1000`)
	checkpointsOf = pg.Define(pg.RoleReadmodel, "auditlog.checkpoints_of", `
	SELECT `+pg.Columns[checkpoint]("c")+` FROM readmodel.audit_checkpoint c WHERE c.key_id = $1 ORDER BY c.number`)
	newestCheckpoint = pg.Define(pg.RoleReadmodel, "auditlog.newest_checkpoint", `
	SELECT `+pg.Columns[checkpoint]("c")+` FROM readmodel.audit_checkpoint c ORDER BY c.number DESC LIMIT 1`)
	signAgain = pg.Define(pg.RoleReadmodel, "auditlog.sign_checkpoint_again", `
	UPDATE readmodel.audit_checkpoint SET key_id = $2, signature = $3 WHERE number = $1 AND key_id = $4`)
	allCheckpoints = pg.Define(pg.RoleReadmodel, "auditlog.checkpoints", `
	SELECT `+pg.Columns[checkpoint]("c")+` FROM readmodel.audit_checkpoint c ORDER BY c.number`)
	// cutUntil is the time before which a checkpoint allows readmodel.cut_audit to cut the rows up to it.
	cutUntil = pg.Define(pg.RoleReadmodel, "auditlog.cut_until", `
	SELECT mesh.clock() - make_interval(secs => coalesce((
		SELECT p.value::float8 FROM mesh.policy p WHERE p.key = 'retention.audit_seconds'), 34560000))`)
	firstLeft = pg.Define(pg.RoleReadmodel, "auditlog.first_row_left", `
	SELECT `+pg.Columns[logRow]("a")+` FROM readmodel.audit a WHERE a.number = $1`)
)

// UseKeys sets the keys with which checkpoints are signed and checked from now on.
func (l *Log) UseKeys(keys CheckpointKeys) { l.keys.Store(&keys) }

// Checkpoint signs the end of the log, if the log has grown since the newest checkpoint, and signs again the
// checkpoints that a former key has signed, while that key is known. It first checks the rows since the newest
// checkpoint: an end that does not follow from it is not signed.
func (l *Log) Checkpoint(ctx context.Context) error {
	keys := l.keys.Load()
	if keys == nil || keys.Signing == nil {
		return errors.New("sign the audit log: there is no key")
	}
	if keys.Confirmed != nil {
		if err := keys.Confirmed(); err != nil {
			return fmt.Errorf("sign the audit log: %w", err)
		}
	}
	end, err := l.grown(ctx, keys)
	if err != nil {
		return fmt.Errorf("sign the audit log: %w", err)
	}
	if end != nil {
		end.At = end.At.Truncate(time.Microsecond)
		end.sign(keys)
		if _, err := pg.Exec(ctx, l.db, insertCheckpoint, end.Number, end.Pos, end.Hash, end.At, end.KeyID,
			end.Signature); err != nil {
			return fmt.Errorf("write checkpoint of the audit log: %w", err)
		}
		l.signedUpTo.Store(end.Number)
	}
	public, _ := keys.Signing.Public().(ed25519.PublicKey)
	others, err := pg.All[checkpoint](ctx, l.db, checkpointsOfOthers, pki.KeyID(public))
	if err != nil {
		return fmt.Errorf("read checkpoints of the audit log: %w", err)
	}
	for i := range others {
		if problem := others[i].problem(keys); problem != "" {
			l.logger.WarnContext(ctx, "a checkpoint of the audit log is not signed anew", slog.Int64("number", others[i].Number),
				slog.String("problem", problem))
			continue
		}
		if err := others[i].signAnew(ctx, l.db, keys); err != nil {
			return err
		}
	}
	return nil
}

// grown returns the end of the log, to be signed, if it follows from the newest checkpoint and has no checkpoint yet;
// nil if there is nothing to sign.
func (l *Log) grown(ctx context.Context, keys *CheckpointKeys) (*checkpoint, error) {
	tx, err := l.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return nil, err
	}
	defer tx.Rollback(context.WithoutCancel(ctx)) // nothing is kept
	end, err := pg.One[checkpoint](ctx, tx, endRow)
	if pg.IsNoRows(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read its end: %w", err)
	}
	newest, err := pg.One[checkpoint](ctx, tx, newestCheckpoint)
	if err != nil && !pg.IsNoRows(err) {
		return nil, fmt.Errorf("read its newest checkpoint: %w", err)
	}
	if signed := l.signedUpTo.Load(); newest.Number < signed {
		return nil, fmt.Errorf("the checkpoint at row %d, which was signed here, is gone", signed)
	}
	w := walk{tx: tx, last: make([]byte, sha256.Size), keys: keys}
	if newest.Number > 0 {
		if problem := newest.problem(keys); problem != "" {
			return nil, fmt.Errorf("the newest checkpoint, at row %d: %s", newest.Number, problem)
		}
		w.begin(newest)
	}
	if err := w.follow(ctx); err != nil {
		return nil, err
	}
	if !w.verdict.Intact() {
		return nil, fmt.Errorf("row %d does not follow: %s", w.verdict.BrokenAt, w.verdict.Because)
	}
	return &end, nil
}

// NeedKey signs again the checkpoints that a former key has signed, and returns what still needs that key; "" means
// nothing. A checkpoint whose signature by that key is not valid does not need the key.
func (l *Log) NeedKey(ctx context.Context, q pg.Querier, keyID string, public ed25519.PublicKey) (string, error) {
	const need = "checkpoints of the audit log"
	list, err := pg.All[checkpoint](ctx, q, checkpointsOf, keyID)
	if err != nil {
		return "", fmt.Errorf("read checkpoints of the audit log: %w", err)
	}
	list = slices.DeleteFunc(list, func(c checkpoint) bool { return !ed25519.Verify(public, c.signed(), c.Signature) })
	if len(list) == 0 {
		return "", nil
	}
	keys := l.keys.Load()
	// While this replica does not know which key signs, every checkpoint may still need the key.
	known := keys != nil && keys.Signing != nil && (keys.Confirmed == nil || keys.Confirmed() == nil)
	if !known {
		return need, nil
	}
	if signing, _ := keys.Signing.Public().(ed25519.PublicKey); pki.KeyID(signing) == keyID {
		return need, nil
	}
	for i := range list {
		if err := list[i].signAnew(ctx, q, keys); err != nil {
			return "", err
		}
	}
	return "", nil
}

// signAnew replaces the signature of a checkpoint with one by the key that signs now.
func (c *checkpoint) signAnew(ctx context.Context, q pg.Querier, keys *CheckpointKeys) error {
	former := c.KeyID
	c.sign(keys)
	if _, err := pg.Exec(ctx, q, signAgain, c.Number, c.KeyID, c.Signature, former); err != nil {
		return fmt.Errorf("sign checkpoint of the audit log anew: %w", err)
	}
	return nil
}

// anchored begins a walk behind the checkpoint up to which rows were cut, if rows were cut.
func (w *walk) anchored(ctx context.Context, keys *CheckpointKeys, firstRow int64) error {
	list, err := pg.All[checkpoint](ctx, w.tx, allCheckpoints)
	if err != nil {
		return fmt.Errorf("read checkpoints: %w", err)
	}
	w.keys, w.checkpoints = keys, list
	if firstRow <= 1 {
		return nil
	}
	for len(w.checkpoints) > 0 && w.checkpoints[0].Number < firstRow {
		c := w.checkpoints[0]
		w.checkpoints = w.checkpoints[1:]
		if c.Number != firstRow-1 {
			continue
		}
		if problem := c.problem(keys); problem != "" {
			w.broken(firstRow, "the checkpoint at row "+itoa(c.Number)+", which the log begins behind, cannot be believed: "+
				problem)
			return nil
		}
		w.verdict.From = c.Number
		w.begin(c)
		return nil
	}
	return w.withinCut(ctx, keys, firstRow)
}

// withinCut begins a walk at the first row, if the rows before it may have been cut on the way to a checkpoint: rows
// are cut in batches, and between two of them the log begins behind no checkpoint. The hash of that checkpoint covers
// the rows that are left. Without such a checkpoint the walk finds that the first row is missing.
func (w *walk) withinCut(ctx context.Context, keys *CheckpointKeys, firstRow int64) error {
	until, err := pg.Value[time.Time](ctx, w.tx, cutUntil)
	if err != nil {
		return fmt.Errorf("read how far the audit log may be cut: %w", err)
	}
	allowed := func(c checkpoint) bool { return c.At.Before(until) && c.problem(keys) == "" }
	if !slices.ContainsFunc(w.checkpoints, allowed) {
		return nil
	}
	first, err := pg.One[logRow](ctx, w.tx, firstLeft, firstRow)
	if pg.IsNoRows(err) {
		return nil // no row is left, and no checkpoint is behind the end
	}
	if err != nil {
		return fmt.Errorf("read the first row: %w", err)
	}
	w.verdict.From = firstRow - 1
	w.verdict.Rows, w.last, w.after = firstRow-1, first.Previous, first.Pos-1
	return nil
}

// begin starts the walk behind a checkpoint whose signature is valid.
func (w *walk) begin(c checkpoint) {
	w.verdict.Rows, w.last, w.after = c.Number, c.Hash, c.Pos
	w.verdict.Signed, w.verdict.SignedAt = c.Number, c.At
}

// passed compares a row that fits the chain with its checkpoint, if it has one.
func (w *walk) passed(row logRow) {
	if len(w.checkpoints) == 0 || w.checkpoints[0].Number != row.Number {
		return
	}
	c := w.checkpoints[0]
	w.checkpoints = w.checkpoints[1:]
	problem := c.problem(w.keys)
	switch {
	case problem != "":
		if w.verdict.Unsigned++; w.verdict.Unsigned == 1 {
			w.verdict.UnsignedBecause = "row " + itoa(c.Number) + ": " + problem
		}
	case !bytes.Equal(c.Hash, row.Hash) || c.Pos != row.Pos:
		w.broken(row.Number, "it is not the row that was signed at "+c.At.UTC().Format(time.RFC3339))
	default:
		w.verdict.Signed, w.verdict.SignedAt = c.Number, c.At
	}
}
