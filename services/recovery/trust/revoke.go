package trust

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/identity"
)

// revokeAtOnce bounds the certificates that one transaction revokes.
const revokeAtOnce = 200

// outstanding is a certificate of the former issuer.
type outstanding struct {
	Serial string `db:"serial"`
	NodeID string `db:"node_id" expr:"@.node_id::text"`
}

var (
	readOutstanding = pg.Define(pg.RoleRecovery, "trust.read_outstanding", `
		SELECT `+pg.Columns[outstanding]("s")+` FROM recovery.serial s
		WHERE s.issuer_fingerprint = $1 AND s.state IN ('current', 'next') AND s.not_after > mesh.clock()
		ORDER BY s.not_after LIMIT $2`)

	revokeOutstanding = pg.Define(pg.RoleRecovery, "trust.revoke_outstanding", `
		UPDATE recovery.serial SET state = 'revoked', state_at = mesh.clock()
		WHERE serial = ANY ($1) AND state IN ('current', 'next')`)
)

// force revokes the certificates of the former issuer, and then ends the rotation. While the ingress refuses what the
// authority signs it waits: a node whose certificate is revoked is issued no other one then.
func (p *Preflight) force(ctx context.Context, row rotationRow) (bool, error) {
	state, err := readPreflight(ctx, p.deps.Pool)
	if err != nil {
		return false, err
	}
	waitsFor := waitsForRevoked
	if state.State == stateMismatch {
		waitsFor = waitsForMismatch
	}
	changed, err := p.waits(ctx, row, waitsFor)
	if err != nil || changed || waitsFor == waitsForMismatch {
		return changed, err
	}
	if changed, err = p.revokeFormer(ctx, row); err != nil || changed {
		return changed, err
	}
	return p.retire(ctx, row)
}

// revokeFormer revokes certificates of the former issuer, and reports whether there were any. Replicas of nodeapi close
// the sessions of these nodes, which then recover with their tokens.
func (p *Preflight) revokeFormer(ctx context.Context, row rotationRow) (bool, error) {
	var revoked int
	err := pg.InTx(ctx, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		list, err := pg.All[outstanding](ctx, tx, readOutstanding, row.Former, revokeAtOnce)
		if err != nil {
			return fmt.Errorf("read certificates of the former issuer: %w", err)
		}
		if revoked = len(list); revoked == 0 {
			return nil
		}
		var serials, nodes []string
		for _, one := range list {
			serials, nodes = append(serials, one.Serial), append(nodes, one.NodeID)
		}
		slices.Sort(nodes)
		locked, err := identity.Lock(ctx, tx, slices.Compact(nodes)...)
		if err != nil {
			return err
		}
		if _, err := pg.Exec(ctx, tx, revokeOutstanding, serials); err != nil {
			return fmt.Errorf("revoke certificates of the former issuer: %w", err)
		}
		var records []*identity.Record
		for _, r := range locked {
			if slices.Contains(serials, r.NextSerial) {
				r.NextSerial = ""
			}
			if slices.Contains(serials, r.CurrentSerial) {
				r.CurrentSerial, r.CertificateEnds, r.IssuerFingerprint = "", time.Time{}, ""
			}
			records = append(records, r)
		}
		_, err = identity.Save(ctx, tx, records...)
		return err
	})
	if err != nil {
		return false, err
	}
	if revoked == 0 {
		return false, nil
	}
	p.deps.Changed.Notify()
	p.deps.Logger.WarnContext(ctx, "certificates of the former issuer are revoked", slog.Int("count", revoked))
	return true, failpoint.Hit("recovery.rotation.after_revoke")
}
