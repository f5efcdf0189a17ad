package keyset

import (
	"context"
	"crypto/x509"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
)

// register stores the first issuer: that of this replica's certificate.
func (c *change) register(ctx context.Context, tx pgx.Tx, _ *Rotation) error {
	if len(c.rows) > 0 {
		return nil
	}
	chain, err := c.part.issuers.Store.Chain()
	if err != nil {
		return err
	}
	root, err := pki.Anchor(chain, c.part.issuers.Roots.Roots())
	if err != nil {
		return err
	}
	if _, err := c.insertRoot(ctx, tx, root, Signing); err != nil {
		return err
	}
	if err := c.note(ctx, tx, "key.register", pki.RootID(root), "first start", ""); err != nil {
		return err
	}
	return c.read(ctx, tx)
}

// requestEnds is how long a request for the next issuer of services waits for its file.
const requestEnds = 7 * 24 * time.Hour

// withdrawn replaces the key id of a request that has ended without a key.
const withdrawn = "withdrawn"

// ended reports whether a request for an issuer of services has waited for too long.
func ended(asked Rotation, now time.Time) bool {
	return asked.Kind == Services && now.Sub(asked.RequestedAt) > requestEnds
}

// adopt stores the next issuer: a root of the file that was requested, or whose certificates are presented already.
func (c *change) adopt(ctx context.Context, tx pgx.Tx, asked *Rotation) error {
	if next := in(VerifyOnly, Services, c.rows); len(next) > 0 {
		return c.name(ctx, tx, asked, next[0].KeyID)
	}
	if asked != nil {
		now, err := pg.Value[time.Time](ctx, tx, readClock)
		if err != nil {
			return fmt.Errorf("read clock: %w", err)
		}
		if ended(*asked, now) {
			reason := fmt.Sprintf("no issuer came within %s of the request %s of %s", requestEnds, asked.ID, asked.RequestedBy)
			if err := c.note(ctx, tx, "key.request_ended", string(Services), reason, ""); err != nil {
				return err
			}
			return c.name(ctx, tx, asked, withdrawn)
		}
	}
	root, by, reason, err := c.candidate(ctx, tx, asked)
	if err != nil || root == nil {
		return err
	}
	stored, err := c.insertRoot(ctx, tx, root, VerifyOnly)
	if err != nil || !stored {
		return err
	}
	if err := c.note(ctx, tx, "key.make", pki.RootID(root), reason, by); err != nil {
		return err
	}
	if err := c.name(ctx, tx, asked, pki.RootID(root)); err != nil {
		return err
	}
	return c.read(ctx, tx)
}

// candidate returns the root of the file that is adopted, who has caused it and why; nil if there is none. For a
// request it is the root for which the file has a cross certificate of the issuer that signs, or else the last root
// that the set lacks.
func (c *change) candidate(ctx context.Context, tx pgx.Tx, asked *Rotation) (*x509.Certificate, string, string, error) {
	given, crosses := c.part.issuers.Roots.Given()
	given = slices.DeleteFunc(given, func(root *x509.Certificate) bool { return rowOf(c.rows, root) != nil })
	if len(given) == 0 {
		return nil, "", "", nil
	}
	if asked == nil {
		for _, root := range given {
			shown, err := servedBy(ctx, tx, Key{KeyID: pki.RootID(root)})
			if err != nil || shown != "" {
				return root, "", shown, err
			}
		}
		return nil, "", "", nil
	}
	for _, row := range in(Signing, Services, c.rows) {
		before, err := x509.ParseCertificate(row.PublicKey)
		if err != nil {
			continue
		}
		for _, root := range given {
			if slices.ContainsFunc(crosses, func(cross *x509.Certificate) bool { return pki.Vouches(before, root, cross) }) {
				return root, asked.RequestedBy, asked.Reason, nil
			}
		}
	}
	return given[len(given)-1], asked.RequestedBy, asked.Reason, nil
}

func (c *change) insertRoot(ctx context.Context, tx pgx.Tx, root *x509.Certificate, state string) (bool, error) {
	by, cross := "", []byte{}
	_, crosses := c.part.issuers.Roots.Given()
	for _, row := range c.rows {
		before, err := x509.ParseCertificate(row.PublicKey)
		if err != nil {
			continue
		}
		for _, candidate := range crosses {
			if pki.Vouches(before, root, candidate) {
				by, cross = row.KeyID, candidate.Raw
			}
		}
	}
	tag, err := pg.Exec(ctx, tx, insertKey, string(Services), pki.RootID(root), root.Raw, state,
		filepath.Base(c.part.issuers.Roots.Path()), by, cross,
		c.set.deps.ReplicaID, false)
	if err != nil {
		return false, fmt.Errorf("insert issuer %s: %w", pki.RootID(root), err)
	}
	return tag.RowsAffected() == 1, nil
}
