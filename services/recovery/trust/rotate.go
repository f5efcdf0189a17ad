package trust

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/failpoint"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/obs"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/pki"
	"github.com/gpuaas/mesh/internal/pki/ca"
	"github.com/gpuaas/mesh/internal/replicas"
	"github.com/gpuaas/mesh/services/recovery/rollback"
	"github.com/gpuaas/mesh/services/recovery/trust/canary"
	"github.com/gpuaas/mesh/services/recovery/trust/roots"
	"github.com/gpuaas/mesh/services/recovery/trust/signing"
)

// What a rotation waits for beside replicas.
const (
	waitsForIssuer   = "the next issuer to be made"
	waitsForReplicas = "each replica of nodeapi to trust the next issuer"
	waitsForFiles    = "each replica of recovery to have the next issuer in its ca_dir"
	waitsForLeaves   = "certificates of the former issuer to be renewed or to end"
	waitsForRevoked  = "certificates of the former issuer to be revoked"
	waitsForRoom     = "one of the roots to be withdrawn that replicas of nodeapi are sent, of which there are as many " +
		"as may be: `gpuaas ca repair --withdraw --root FINGERPRINT --reason TEXT`, or give the rotation up: `gpuaas ca " +
		"rotate --cancel --reason TEXT`"
	waitsForMismatch = "the ingress and the authority to agree (`gpuaas ca status`)"
)

// Rotate brings the open rotation one step further, if there is one and its next phase can begin, and reports whether
// it wrote anything. The holder of the preflight's lease calls it. A step that a crash has interrupted is repeated: the
// id of the rotation names the issuer, and each phase is one transaction.
func (p *Preflight) Rotate(ctx context.Context) (bool, error) {
	row, open, err := p.openRotation(ctx)
	switch {
	case err != nil:
		return false, err
	case !open:
		p.ready, p.nextCanary = 0, canary.Certificate{}
		return false, nil
	case p.deps.Rotating == nil:
		return false, nil // a replica with the authority's directory carries it out
	}
	if active, err := rollback.Active(ctx, p.deps.Pool); err != nil || active {
		return false, err // what the database has of certificates may be older than the nodes
	}
	var changed bool
	switch {
	case row.Phase == phaseBoth && row.Forced:
		changed, err = p.force(ctx, row)
	case row.Phase == phaseBoth:
		changed, err = p.retire(ctx, row)
	case row.Next == "":
		changed, err = p.announce(ctx, row)
	default:
		if err = p.noteIssuer(ctx, row); err == nil {
			changed, err = p.introduce(ctx, row)
		}
	}
	if changed {
		p.deps.Wake.Notify()
		p.pause = p.cfg.Again
	}
	if err != nil {
		return changed, fmt.Errorf("rotate authority: %w", err)
	}
	return changed, nil
}

// NoteIssuer notes that this replica has the next issuer of the rotation that is announced, if it has. Each replica of
// recovery calls it: the next issuer signs once all have it.
func (p *Preflight) NoteIssuer(ctx context.Context) error {
	if p.deps.Rotating == nil {
		return nil
	}
	row, open, err := p.openRotation(ctx)
	if err != nil || !open {
		return err
	}
	return p.noteIssuer(ctx, row)
}

// openRotation returns the open rotation, and whether there is one. Each begins with an event: where there was none it
// is read again after one.
func (p *Preflight) openRotation(ctx context.Context) (rotationRow, bool, error) {
	if !p.rotations.Due(0) {
		return rotationRow{}, false, nil
	}
	reading := p.deps.Numbered.Reading()
	p.rotations = events.Reading{}
	row, err := pg.One[rotationRow](ctx, p.deps.Pool, readOpenRotation)
	if pg.IsNoRows(err) {
		p.rotations = reading
		return rotationRow{}, false, nil
	}
	if err != nil {
		return rotationRow{}, false, fmt.Errorf("read rotation: %w", err)
	}
	return row, true, nil
}

func (p *Preflight) noteIssuer(ctx context.Context, row rotationRow) error {
	if row.Phase != phaseAnnounced || row.Next == "" || p.has == row.Next {
		return nil
	}
	if _, err := p.deps.Rotating.Find(row.Next); err != nil {
		p.deps.Logger.WarnContext(ctx, "this replica does not have the next issuer of the authority", obs.Err(err))
		return nil
	}
	if _, err := pg.Exec(ctx, p.deps.Pool, insertHolder, p.deps.Replica, row.Next); err != nil {
		return fmt.Errorf("note the next issuer: %w", err)
	}
	p.has = row.Next
	return nil
}

// step changes the open rotation in one transaction, if it is as it was read, and reports whether it did.
func (p *Preflight) step(ctx context.Context, was rotationRow,
	change func(ctx context.Context, tx pgx.Tx, row *rotationRow) (bool, error),
) (bool, error) {
	changed := false
	var row rotationRow
	err := pg.InTx(ctx, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if row, err = pg.One[rotationRow](ctx, tx, lockOpenRotation); err != nil {
			if pg.IsNoRows(err) {
				changed = false
				return nil // another replica, or a person, was faster
			}
			return fmt.Errorf("lock rotation: %w", err)
		}
		if row.ID != was.ID || row.Version != was.Version {
			changed = false
			return nil
		}
		if changed, err = change(ctx, tx, &row); err != nil || !changed {
			return err
		}
		return row.save(ctx, tx)
	})
	if err != nil {
		return false, err
	}
	if changed && (row.Phase != was.Phase || row.Next != was.Next) {
		p.deps.Logger.InfoContext(ctx, "the rotation of the authority goes on", slog.String("rotation_id", row.ID),
			slog.String("phase", row.Phase), slog.String("next", row.Next))
	}
	return changed, nil
}

// announce makes the next issuer, and has replicas of nodeapi sent its root.
func (p *Preflight) announce(ctx context.Context, row rotationRow) (bool, error) {
	issuer, err := p.deps.Rotating.Prepare(row.ID, row.WithRoot)
	if err != nil {
		changed, noted := p.waits(ctx, row, waitsForIssuer+": replica "+p.deps.Replica+" of recovery cannot, and its log "+
			"has the cause; repair its ca_dir, or give the rotation up: `gpuaas ca rotate --cancel --reason TEXT`")
		return changed, errors.Join(err, noted)
	}
	if err := failpoint.Hit("recovery.rotation.after_prepare"); err != nil {
		return false, err
	}
	changed, err := p.step(ctx, row, func(ctx context.Context, tx pgx.Tx, row *rotationRow) (bool, error) {
		if row.WithRoot {
			err := roots.Trust(ctx, tx, issuer.Root, roots.OfRotation, row.Reason, row.By)
			if fault.Has(err, commonv1.Reason_REASON_PRECONDITION_FAILED) { // repairs have taken the room meanwhile
				known := row.WaitsFor == waitsForRoom
				row.WaitsFor = waitsForRoom
				return !known, nil
			}
			if err != nil {
				return false, err
			}
		}
		row.Next, row.NextRoot = pki.Fingerprint(issuer.Certificate), pki.Fingerprint(issuer.Root)
		row.WaitsFor = waitsForReplicas
		return true, nil
	})
	if err != nil {
		return false, err
	}
	return changed, failpoint.Hit("recovery.rotation.after_announce")
}

// introduce has the next issuer sign once each replica of nodeapi has accepted a certificate of it in two rounds.
func (p *Preflight) introduce(ctx context.Context, row rotationRow) (bool, error) {
	waits, err := p.lacking(ctx, row)
	if err != nil {
		return false, err
	}
	if waits != "" {
		p.ready = 0
		return p.waits(ctx, row, waits)
	}
	if p.ready++; p.ready < inARow {
		p.pause = p.cfg.Again
		return false, nil
	}
	if err := failpoint.Hit("recovery.rotation.before_sign"); err != nil {
		return false, err
	}
	changed, err := p.step(ctx, row, func(ctx context.Context, tx pgx.Tx, row *rotationRow) (bool, error) {
		state, err := readPreflight(ctx, tx)
		if err != nil {
			return false, err
		}
		if state.State == stateMismatch {
			known := row.WaitsFor == waitsForMismatch
			row.WaitsFor = waitsForMismatch
			return !known, nil
		}
		if err := signing.Save(ctx, tx, row.Next); err != nil {
			return false, err
		}
		if _, err := pg.Exec(ctx, tx, deleteHolders); err != nil {
			return false, fmt.Errorf("delete which replicas have the next issuer: %w", err)
		}
		row.Phase, row.WaitsFor = phaseBoth, waitsForLeaves
		return true, nil
	})
	if err != nil {
		return false, err
	}
	return changed, failpoint.Hit("recovery.rotation.after_sign")
}

// waits writes what the rotation waits for, if it is something else than before in two rounds.
func (p *Preflight) waits(ctx context.Context, row rotationRow, text string) (bool, error) {
	seen := p.waiting == text
	if p.waiting = text; row.WaitsFor == text || !seen {
		return false, nil
	}
	return p.step(ctx, row, func(_ context.Context, _ pgx.Tx, row *rotationRow) (bool, error) {
		row.WaitsFor = text
		return true, nil
	})
}

// lacking returns what keeps the next issuer from signing; empty: each replica of nodeapi publishes that it trusts the
// issuer, and has accepted a certificate of it.
func (p *Preflight) lacking(ctx context.Context, row rotationRow) (string, error) {
	var list []replicas.Trusting
	var without string
	c := &check{}
	err := pg.InTx(ctx, p.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		var err error
		if list, err = replicas.ReadTrust(ctx, tx); err != nil {
			return err
		}
		if c.at, err = pg.Value[time.Time](ctx, tx, readClock); err != nil {
			return fmt.Errorf("read clock: %w", err)
		}
		without, err = withoutFiles(ctx, tx, row.Next)
		return err
	})
	if err != nil {
		return "", err
	}
	if without != "" {
		return without, nil
	}
	if !p.nextCanary.Usable(row.Next, time.Now()) {
		bounded, cancel := context.WithTimeout(ctx, p.cfg.Ask)
		defer cancel()
		p.nextCanary, err = canary.New(bounded, func(ctx context.Context, req ca.SignRequest) (ca.Issued, error) {
			return p.deps.Rotating.SignWith(ctx, row.Next, req)
		}, p.deps.TrustDomain, c.at)
		if err != nil {
			p.nextCanary = canary.Certificate{}
			return "", err
		}
	}
	c.targets = targetsOf(p.agentAddress(), list, &authority{anchors: []string{row.Next, row.NextRoot}})
	p.shake(ctx, c, p.nextCanary)
	return withoutIssuer(c.targets), nil
}

// withoutFiles returns which live replicas of recovery do not have an issuer, replicas of earlier builds among them.
func withoutFiles(ctx context.Context, tx pgx.Tx, issuer string) (string, error) {
	have, err := pg.Values[string](ctx, tx, readHolders, issuer)
	if err != nil {
		return "", fmt.Errorf("read which replicas have the next issuer: %w", err)
	}
	live, err := keyset.Holders(ctx, tx)
	if err != nil {
		return "", err
	}
	var lack []string
	for _, replica := range live {
		if replica.Service == pg.RoleRecovery && !slices.Contains(have, replica.ReplicaID) {
			lack = append(lack, replica.ReplicaID)
		}
	}
	if len(lack) == 0 {
		return "", nil
	}
	slices.Sort(lack)
	return waitsForFiles + ": " + strings.Join(lack, ", "), nil
}

// withoutIssuer returns which targets do not trust an issuer, by what they publish and by their handshakes. The address
// that agents are told must not refuse it; it may be one that recovery does not reach.
func withoutIssuer(targets []*target) string {
	var lack []string
	known := 0
	for _, t := range targets {
		own := t.replica.ReplicaID != ""
		if own {
			known++
		}
		switch {
		case t.outcome == canary.Refused:
			lack = append(lack, t.name()+" refuses it")
		case own && !t.listed:
			lack = append(lack, t.name()+" does not publish that it trusts it")
		case own && t.outcome != canary.Trusted:
			lack = append(lack, t.name()+" was not reached")
		}
	}
	if len(lack) == 0 && known == 0 {
		return waitsForReplicas + ": none is there"
	}
	if len(lack) == 0 {
		return ""
	}
	slices.Sort(lack)
	if more := len(lack) - mostNamed; more > 0 {
		lack = append(lack[:mostNamed], fmt.Sprintf("%d more", more))
	}
	return waitsForReplicas + ": " + strings.Join(lack, "; ")
}

// retire ends the rotation once no certificate of the former issuer counts.
func (p *Preflight) retire(ctx context.Context, row rotationRow) (bool, error) {
	changed, err := p.step(ctx, row, func(ctx context.Context, tx pgx.Tx, row *rotationRow) (bool, error) {
		now, err := pg.Value[time.Time](ctx, tx, readClock)
		if err != nil {
			return false, fmt.Errorf("read clock: %w", err)
		}
		if now.Sub(row.Since) < p.cfg.Overlap {
			return false, nil
		}
		last, err := pg.Value[*time.Time](ctx, tx, lastOutstanding, row.Former)
		if err != nil {
			return false, fmt.Errorf("read certificates of the former issuer: %w", err)
		}
		if last != nil {
			return false, nil
		}
		row.Phase, row.WaitsFor = phaseDone, ""
		if row.WithRoot {
			_, err = roots.Distrust(ctx, tx, row.FormerRoot)
		}
		return true, err
	})
	if err != nil {
		return false, err
	}
	if changed {
		err = failpoint.Hit("recovery.rotation.after_retire")
	}
	return changed, err
}
