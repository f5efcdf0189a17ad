package project

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
)

// checkpointDomain begins what is signed, so that no signature of another kind is one of a checkpoint.
const checkpointDomain = "gpuaas-mesh audit checkpoint 1\x00"

// CheckpointKeys are those that sign and verify checkpoints of the audit log: the assertion keys of this service.
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

// signed is what a checkpoint's signature is over.
func (c *checkpoint) signed() []byte {
	out := []byte(checkpointDomain)
	out = binary.BigEndian.AppendUint64(out, uint64(c.Number))         //nolint:gosec // a count of rows
	out = binary.BigEndian.AppendUint64(out, uint64(c.Pos))            //nolint:gosec // a position
	out = binary.BigEndian.AppendUint64(out, uint64(c.At.UnixMicro())) //nolint:gosec // a time
	return append(out, c.Hash...)
}

// sign signs a checkpoint with the key that signs now.
func (c *checkpoint) sign(keys *CheckpointKeys) {
	public, _ := keys.Signing.Public().(ed25519.PublicKey)
	c.KeyID, c.Signature = pki.KeyID(public), ed25519.Sign(keys.Signing, c.signed())
}

// problem says what is wrong with the signature; empty if it is good.
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
	auditEndRow = pg.Define(pg.RoleReadmodel, "project.audit_end_row", `
	SELECT a.number, a.pos, a.hash, mesh.clock() AS at, '' AS key_id, ''::bytea AS signature
	FROM readmodel.audit a JOIN readmodel.audit_head h USING (number, hash)
	WHERE NOT EXISTS (SELECT FROM readmodel.audit_checkpoint c WHERE c.number = a.number)`)
	insertCheckpoint = pg.Define(pg.RoleReadmodel, "project.insert_checkpoint", `
	INSERT INTO readmodel.audit_checkpoint (number, pos, hash, at, key_id, signature) VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING`)
	checkpointsOfOthers = pg.Define(pg.RoleReadmodel, "project.checkpoints_of_others", `
	SELECT `+pg.Columns[checkpoint]("c")+` FROM readmodel.audit_checkpoint c WHERE c.key_id <> $1 ORDER BY c.number LIMIT $2`)
	signAgain = pg.Define(pg.RoleReadmodel, "project.sign_checkpoint_again", `
	UPDATE readmodel.audit_checkpoint SET key_id = $2, signature = $3 WHERE number = $1 AND key_id = $4`)
	allCheckpoints = pg.Define(pg.RoleReadmodel, "project.checkpoints", `
	SELECT `+pg.Columns[checkpoint]("c")+` FROM readmodel.audit_checkpoint c ORDER BY c.number`)
)

// UseKeys makes checkpoints be signed and checked with these keys from now on.
func (a *Audit) UseKeys(keys CheckpointKeys) { a.keys.Store(&keys) }

// Checkpoint signs the state of the log, if it has grown since the last time, and signs anew what a former key has
// signed, while that key is known.
func (a *Audit) Checkpoint(ctx context.Context) error {
	keys := a.keys.Load()
	if keys == nil || keys.Signing == nil {
		return errors.New("sign the audit log: there is no key")
	}
	if keys.Confirmed != nil {
		if err := keys.Confirmed(); err != nil {
			return fmt.Errorf("sign the audit log: %w", err)
		}
	}
	end, err := pg.One[checkpoint](ctx, a.db, auditEndRow)
	switch {
	case pg.IsNoRows(err):
	case err != nil:
		return fmt.Errorf("read the end of the audit log: %w", err)
	default:
		end.At = end.At.Truncate(time.Microsecond)
		end.sign(keys)
		if _, err := pg.Exec(ctx, a.db, insertCheckpoint, end.Number, end.Pos, end.Hash, end.At, end.KeyID, end.Signature); err != nil {
			return fmt.Errorf("write checkpoint of the audit log: %w", err)
		}
	}
	_, err = a.signAnew(ctx, a.db, keys)
	return err
}

// NeedKey signs anew what former keys have signed, and says whether one may still be needed; "" is no.
func (a *Audit) NeedKey(ctx context.Context, q pg.Querier) (string, error) {
	keys := a.keys.Load()
	if keys == nil || keys.Signing == nil {
		return "", errors.New("sign the audit log: there is no key")
	}
	more, err := a.signAnew(ctx, q, keys)
	if err != nil || !more {
		return "", err
	}
	return "checkpoints of the audit log", nil
}

// mostSignedAnew is how many checkpoints are signed anew at a time.
const mostSignedAnew = 1000

// signAnew signs checkpoints that another key has signed, and reports whether there are more. One whose signature is
// not good stays as it is.
func (a *Audit) signAnew(ctx context.Context, q pg.Querier, keys *CheckpointKeys) (bool, error) {
	public, _ := keys.Signing.Public().(ed25519.PublicKey)
	others, err := pg.All[checkpoint](ctx, q, checkpointsOfOthers, pki.KeyID(public), mostSignedAnew)
	if err != nil {
		return false, fmt.Errorf("read checkpoints of the audit log: %w", err)
	}
	for i := range others {
		c := &others[i]
		if problem := c.problem(keys); problem != "" {
			a.logger.WarnContext(ctx, "a checkpoint of the audit log is not signed anew", slog.Int64("number", c.Number),
				slog.String("problem", problem))
			continue
		}
		former := c.KeyID
		c.sign(keys)
		if _, err := pg.Exec(ctx, q, signAgain, c.Number, c.KeyID, c.Signature, former); err != nil {
			return false, fmt.Errorf("sign checkpoint of the audit log anew: %w", err)
		}
	}
	return len(others) == mostSignedAnew, nil
}

// anchored begins a walk at the checkpoint that rows were cut up to, if they were.
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
			w.broken(firstRow, "the checkpoint at row "+itoa(c.Number)+", which the log begins behind, cannot be believed: "+problem)
			return nil
		}
		w.verdict.From, w.verdict.Rows, w.last, w.after = c.Number, c.Number, c.Hash, c.Pos
		w.verdict.Signed, w.verdict.SignedAt = c.Number, c.At
		return nil
	}
	return nil // the first row is missed
}

// passed compares a row that fits with its checkpoint, if it has one.
func (w *walk) passed(row auditRow) {
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
