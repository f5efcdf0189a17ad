package keyset

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/pg"
)

// due reports whether the kind's keys may need a change.
func (s *Set) due(p *part, rows []Key, open []Rotation) bool {
	if len(rows) == 0 || len(in(VerifyOnly, p.Kind, rows)) > 0 {
		return true
	}
	// A request for an issuer of services waits for a file.
	if slices.ContainsFunc(
		open, func(r Rotation) bool { return r.Kind == p.Kind && (r.Kind != Services || ended(r, s.now())) },
	) {
		return true
	}
	if len(p.orphans(rows)) > 0 {
		return true
	}
	return len(in(VerifyingAfter, p.Kind, rows)) > 0 && time.Since(p.retired) >= retireEvery
}

// orphans returns the keys of the files that follow by endorsements from a key of the set and that the set does not
// have, each behind the one that endorses it. They come from a rotation that was interrupted between its file and its
// row, or were lost when the database was restored.
func (p *part) orphans(rows []Key) []privateKey {
	known := slices.Clone(rows)
	has := func(keyID string) bool {
		return slices.ContainsFunc(known, func(row Key) bool { return row.KeyID == keyID })
	}
	if !slices.ContainsFunc(p.keys, func(key privateKey) bool { return key.endorsedBy != "" && !has(key.id) }) {
		return nil
	}
	pinned, _ := p.pinned(rows) // without its file the candidates are no orphans of ours yet
	var out []privateKey
	for more := true; more; {
		more = false
		for _, key := range p.keys {
			if key.endorsedBy == "" || has(key.id) || !has(key.endorsedBy) {
				continue
			}
			with := append(slices.Clone(known), Key{
				Kind: p.Kind, KeyID: key.id, PublicKey: key.public(), State: VerifyOnly, EndorsedBy: key.endorsedBy,
				Endorsement: key.endorsement,
			})
			if Trusted(p.Kind, pinned, with)[key.id] != nil {
				out, known, more = append(out, key), with, true
			}
		}
	}
	return out
}

// drive changes the kind's keys in one transaction, and returns its rows as they are then.
func (s *Set) drive(ctx context.Context, p *part) ([]Key, error) {
	c := &change{set: s, part: p}
	err := s.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if err := c.run(ctx, tx); err != nil {
			return err
		}
		return s.at("before_commit")
	})
	if err != nil {
		// A file that was made stays: the next change stores its key.
		return nil, fmt.Errorf("change keys of %s: %w", p.Kind, err)
	}
	p.retired = time.Now()
	c.clean()
	for _, line := range c.lines {
		s.deps.Logger.InfoContext(ctx, "signing keys changed", slog.String("kind", string(p.Kind)),
			slog.String("change", line))
	}
	if p.issuers != nil {
		return c.rows, nil
	}
	keys, _, err := p.Files.read(p.Kind)
	if err != nil {
		return nil, err
	}
	p.keys = keys
	return c.rows, nil
}

// change is one transaction that changes the keys of a kind.
type change struct {
	set  *Set
	part *part

	made  *privateKey // written to a file by this change
	used  bool        // whether its row was stored
	rows  []Key
	lines []string
}

// clean removes the file of a key that was made in vain, because another replica stored its key first.
func (c *change) clean() {
	if c.made != nil && !c.used {
		_ = os.Remove(filepath.Join(c.part.Files.Dir, c.made.file))
	}
}

func (c *change) run(ctx context.Context, tx pgx.Tx) error {
	c.used, c.lines = false, nil
	p := c.part
	if _, err := pg.Exec(ctx, tx, takeKindLock, string(p.Kind)); err != nil {
		return fmt.Errorf("take lock: %w", err)
	}
	if err := c.read(ctx, tx); err != nil {
		return err
	}
	open, err := pg.All[Rotation](ctx, tx, readOpenRotations)
	if err != nil {
		return fmt.Errorf("read rotations: %w", err)
	}
	i := slices.IndexFunc(open, func(r Rotation) bool { return r.Kind == p.Kind })
	var asked *Rotation
	if i >= 0 {
		asked = &open[i]
	}
	steps := []func(context.Context, pgx.Tx, *Rotation) error{c.first, c.make, c.promote, c.retire}
	if p.issuers != nil {
		steps = []func(context.Context, pgx.Tx, *Rotation) error{c.register, c.adopt, c.promote, c.retire}
	}
	for _, step := range steps {
		if err := step(ctx, tx, asked); err != nil {
			return err
		}
	}
	return c.read(ctx, tx)
}

func (c *change) read(ctx context.Context, tx pgx.Tx) error {
	all, err := ReadKeys(ctx, tx)
	c.rows = ofKind(c.part.Kind, all)
	return err
}

// first stores the keys of the files if the kind has none, and makes one if there is no file. The file that sorts last
// signs, as in earlier builds.
func (c *change) first(ctx context.Context, tx pgx.Tx, _ *Rotation) error {
	p := c.part
	if len(c.rows) > 0 {
		return nil
	}
	keys, bad, err := p.Files.read(p.Kind)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(bad)) {
		return differ(p, difference{
			what:   fmt.Sprintf("the file %s in %s is refused: %s", name, p.Files.Dir, bad[name]),
			remedy: fmt.Sprintf("repair the file %s in %s, or remove it", name, p.Files.Dir),
		})
	}
	if len(keys) == 0 {
		if c.made == nil {
			key, err := p.Files.newKey(1, p.Kind, nil)
			if err != nil {
				return err
			}
			if err := p.Files.write(key, p.Kind); err != nil {
				return err
			}
			c.made = &key
		}
		keys = []privateKey{*c.made}
	}
	for i, key := range keys {
		state := VerifyingAfter
		if i == len(keys)-1 {
			state = Signing
		}
		stored, err := insert(ctx, tx, p.Kind, key, firstStored{state: state, madeBy: c.set.deps.ReplicaID})
		if err != nil {
			return err
		}
		if !stored {
			return differ(p, difference{
				what: fmt.Sprintf("the file %s in %s holds key %s, which is a key of another kind: no key serves two kinds",
					key.file, p.Files.Dir, key.id),
				remedy: fmt.Sprintf("remove the file %s from %s", key.file, p.Files.Dir),
			})
		}
		if err := c.note(ctx, tx, "key.register", key.id, "first start", ""); err != nil {
			return err
		}
	}
	c.used = true
	return c.read(ctx, tx)
}

// make stores the next key: one that a rotation left in the files, or a new one that was requested.
func (c *change) make(ctx context.Context, tx pgx.Tx, asked *Rotation) error {
	p := c.part
	orphans := p.orphans(c.rows)
	if next := in(VerifyOnly, p.Kind, c.rows); len(next) > 0 {
		if !slices.ContainsFunc(orphans, func(key privateKey) bool { return key.endorsedBy == next[0].KeyID }) {
			return c.name(ctx, tx, asked, next[0].KeyID)
		}
		// It has endorsed another key, so it has signed: the database has lost that state.
		if err := c.transition(ctx, tx, next[0].KeyID, VerifyOnly, VerifyingAfter, "key.succeeded",
			"it has signed before the database was restored"); err != nil {
			return err
		}
	}
	var key *privateKey
	for i := range orphans {
		key = &orphans[i]
		if i == len(orphans)-1 {
			break
		}
		// The next key succeeded it, and messages that it signed may still be under way.
		stored, err := insert(ctx, tx, p.Kind, *key,
			firstStored{state: VerifyingAfter, madeBy: c.set.deps.ReplicaID, returned: true})
		if err != nil || !stored {
			return err
		}
		if err := c.note(ctx, tx, "key.return", key.id, "its file was made before the database was restored",
			""); err != nil {
			return err
		}
	}
	if key == nil && asked == nil {
		return nil
	}
	returned := key != nil
	if key == nil {
		if c.made == nil {
			signing := in(Signing, p.Kind, c.rows)
			if len(signing) == 0 || p.private(signing[0].KeyID) == nil {
				return nil // another replica, which holds the key that signs, makes the next one
			}
			by := privateKey{id: signing[0].KeyID, private: p.private(signing[0].KeyID)}
			made, err := p.Files.newKey(len(c.rows)+1, p.Kind, &by)
			if err != nil {
				return err
			}
			if err := p.Files.write(made, p.Kind); err != nil {
				return err
			}
			c.made = &made
			if err := c.set.at("after_file"); err != nil {
				return err
			}
		}
		key = c.made
	}
	stored, err := insert(ctx, tx, p.Kind, *key,
		firstStored{state: VerifyOnly, madeBy: c.set.deps.ReplicaID, returned: returned})
	if err != nil || !stored {
		return err
	}
	c.used = true
	by, reason := "", "the file of a rotation that did not end"
	if asked != nil {
		by, reason = asked.RequestedBy, asked.Reason
	}
	if err := c.note(ctx, tx, "key.make", key.id, reason, by); err != nil {
		return err
	}
	if err := c.name(ctx, tx, asked, key.id); err != nil {
		return err
	}
	return c.read(ctx, tx)
}

func (c *change) name(ctx context.Context, tx pgx.Tx, asked *Rotation, keyID string) error {
	if asked == nil {
		return nil
	}
	if _, err := pg.Exec(ctx, tx, nameRotation, string(c.part.Kind), keyID); err != nil {
		return fmt.Errorf("name key of rotation: %w", err)
	}
	return nil
}

// errChanged is returned if a key, under the lock of its kind, is not in the state in which it was read.
var errChanged = errors.New("its state was changed by another")

func (c *change) transition(ctx context.Context, tx pgx.Tx, keyID, from, to, action, reason string) error {
	tag, err := pg.Exec(ctx, tx, moveKey, string(c.part.Kind), keyID, from, to)
	if err == nil && tag.RowsAffected() != 1 {
		err = errChanged
	}
	if err != nil {
		return fmt.Errorf("move key %s to %s: %w", keyID, to, err)
	}
	return c.note(ctx, tx, action, keyID, reason, "")
}

// note writes the audit entry of a change.
func (c *change) note(ctx context.Context, tx pgx.Tx, action, keyID, reason, by string) error {
	c.lines = append(c.lines, fmt.Sprintf("%s %s: %s", action, keyID, reason))
	_, err := audit.Record(ctx, tx, audit.Entry{
		Action: action, Actor: by, Reason: reason, SubjectType: "key", SubjectID: keyID,
		Details: map[string]any{"kind": string(c.part.Kind)},
	})
	return err
}
