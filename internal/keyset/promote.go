package keyset

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// promote makes the next key the one that signs once all replicas that take part hold it.
func (c *change) promote(ctx context.Context, tx pgx.Tx, _ *Rotation) error {
	p := c.part
	next := in(VerifyOnly, p.Kind, c.rows)
	if len(next) == 0 {
		return nil
	}
	key := next[0]
	waits, err := c.lacking(ctx, tx, key)
	if err != nil {
		return err
	}
	if waits == "" && p.Distributed != nil {
		if waits, err = p.Distributed(ctx, tx, key); err != nil {
			return err
		}
	}
	if waits != "" {
		if waits == key.NeededBy {
			return nil
		}
		_, err := pg.Exec(ctx, tx, noteNeed, string(p.Kind), key.KeyID, VerifyOnly, waits)
		if err != nil {
			return fmt.Errorf("note what key %s waits for: %w", key.KeyID, err)
		}
		return nil
	}
	for _, row := range in(Signing, p.Kind, c.rows) {
		if err := c.transition(ctx, tx, row.KeyID, Signing, VerifyingAfter, "key.succeeded",
			"key "+key.KeyID+" signs in its place"); err != nil {
			return err
		}
	}
	if err := c.transition(ctx, tx, key.KeyID, VerifyOnly, Signing, "key.sign", "each replica holds it"); err != nil {
		return err
	}
	return c.read(ctx, tx)
}

// lacking describes which live replicas do not hold a key yet.
func (c *change) lacking(ctx context.Context, tx pgx.Tx, key Key) (string, error) {
	now, err := pg.Value[time.Time](ctx, tx, readClock)
	if err != nil {
		return "", fmt.Errorf("read clock: %w", err)
	}
	if now.Sub(key.MadeAt) < leastAge {
		return "replicas that are starting", nil
	}
	live, err := pg.All[replica](ctx, tx, readReplicas, liveFor.Seconds())
	if err != nil {
		return "", fmt.Errorf("read holders of keys: %w", err)
	}
	var names []string
	for _, r := range live {
		for _, verb := range []string{"sign:", "verify:", "trust:"} {
			word := verb + string(key.Kind)
			if slices.Contains(r.Takes, word) && !slices.Contains(r.Holds, word+":"+key.KeyID) {
				names = append(names, r.Service+" "+r.ReplicaID)
			}
		}
	}
	if len(names) == 0 {
		return "", nil
	}
	if key.Kind == Services {
		return "replicas that do not trust it: " + strings.Join(names, ", "), nil
	}
	return fmt.Sprintf("replicas that do not hold the file %s: %s", key.File, strings.Join(names, ", ")), nil
}

// retire retires former keys that nothing needs.
func (c *change) retire(ctx context.Context, tx pgx.Tx, _ *Rotation) error {
	p := c.part
	now, err := pg.Value[time.Time](ctx, tx, readClock)
	if err != nil {
		return fmt.Errorf("read clock: %w", err)
	}
	for _, key := range in(VerifyingAfter, p.Kind, c.rows) {
		need := ""
		if until := key.StateAt.Add(p.Kind.Overlap()); now.Before(until) {
			need = "what was signed lately, until " + until.UTC().Format(time.RFC3339)
		} else if p.Outstanding != nil {
			if need, err = p.Outstanding(ctx, tx, key); err != nil {
				return err
			}
		}
		if need != "" {
			if need == key.NeededBy {
				continue
			}
			if _, err := pg.Exec(ctx, tx, noteNeed, string(p.Kind), key.KeyID, VerifyingAfter, need); err != nil {
				return fmt.Errorf("note what needs key %s: %w", key.KeyID, err)
			}
			continue
		}
		if err := c.transition(ctx, tx, key.KeyID, VerifyingAfter, Retired, "key.retire",
			"nothing that it signed is outstanding"); err != nil {
			return err
		}
	}
	return nil
}
