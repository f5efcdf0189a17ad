package trust

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/keyset"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/recovery/trust/signing"
)

// checkIssuer returns a fault unless this replica has the issuer that the database names, and its key. A replica with
// another directory must not decide for the mesh what the ingress trusts. It returns nil if the authority is a process
// of its own.
func (p *Preflight) checkIssuer(ctx context.Context, q pg.Querier) error {
	if p.deps.Rotating == nil {
		return nil
	}
	signs, err := signing.Read(ctx, q)
	if err != nil {
		return err
	}
	if _, err := p.deps.Rotating.Find(signs); err != nil {
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, p.lacks(signs), fault.Cause(err),
			fault.Unmet("replica "+p.deps.Replica+" of recovery has the issuer "+signs+" in its ca_dir"),
			fault.Remedy("restore the files issuer-*.pem and root-*.pem of its ca_dir from a backup or from a replica that has "+
				"them, then ask again; if no copy is left: `gpuaas ca repair --withdraw --root "+signs+" --reason TEXT` gives "+
				"that issuer up"))
	}
	return nil
}

// lacks describes that this replica does not have the issuer of a fingerprint.
func (p *Preflight) lacks(signs string) string {
	return "replica " + p.deps.Replica + " of recovery does not have the issuer " + signs +
		", with which the authority signs"
}

// giveUp has the authority sign again with the issuer that it was made with, in place of one that a person declares
// lost. It reports whether the fingerprint is that of the issuer that the database names, and that of no other one.
// Another live replica of recovery may have the issuer, so that there must be none.
func (p *Preflight) giveUp(ctx context.Context, tx pgx.Tx, fingerprint string) (bool, error) {
	if p.deps.Rotating == nil || fingerprint == "" {
		return false, nil
	}
	signs, err := signing.Read(ctx, tx)
	if err != nil {
		return false, err
	}
	if signs != fingerprint {
		return false, nil
	}
	if _, err := p.deps.Rotating.Find(signs); err == nil {
		return true, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"the authority signs with this issuer, which is not lost",
			fault.Unmet("the ca_dir of replica "+p.deps.Replica+" lacks the issuer"),
			fault.Remedy("exchange it: `gpuaas ca rotate --reason TEXT`"))
	}
	open, err := pg.One[rotationRow](ctx, tx, lockOpenRotation)
	if err != nil && !pg.IsNoRows(err) {
		return true, fmt.Errorf("lock rotation: %w", err)
	}
	if err == nil && open.Phase == phaseBoth {
		return true, fault.New(commonv1.Reason_REASON_AUTHORITY_ROTATION_UNDER_WAY, p.lacks(signs),
			fault.Remedy("copy the files issuer-*.pem and root-*.pem from the ca_dir of a replica that has them; the issuer "+
				"can be given up once the rotation is done"))
	}
	others, err := p.otherReplicas(ctx, tx)
	if err != nil {
		return true, err
	}
	if len(others) > 0 {
		return true, fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"other replicas of recovery run, which may have the issuer: "+strings.Join(others, ", "),
			fault.Unmet("no replica of recovery but "+p.deps.Replica+" runs"),
			fault.Remedy("copy issuer-*.pem and root-*.pem of the ca_dir of one that has them to the ca_dir of replica "+
				p.deps.Replica+"; if none has them, stop the others and ask again"))
	}
	return true, signing.Save(ctx, tx, "")
}

// otherReplicas returns the ids of the other live replicas of recovery, sorted.
func (p *Preflight) otherReplicas(ctx context.Context, tx pgx.Tx) ([]string, error) {
	live, err := keyset.Holders(ctx, tx)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, replica := range live {
		if replica.Service == pg.RoleRecovery && replica.ReplicaID != p.deps.Replica {
			out = append(out, replica.ReplicaID)
		}
	}
	slices.Sort(out)
	return out, nil
}

// errNoIssuer is why the roots of an authority that reports no issuer are not known.
var errNoIssuer = errors.New("the authority reports no certificate that it signs with")
