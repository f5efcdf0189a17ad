package fleet

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	recoveryv1 "github.com/gpuaas/mesh/gen/gpuaas/recovery/v1"
	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/rpc"
	"github.com/gpuaas/mesh/services/recovery/incident"
)

// roleSecurity is the role that may close an incident about an identity with a second holder.
const roleSecurity = "security"

// endings has what ends an incident of each kind that a person cannot close: it would be opened again while its
// evidence stands, or another verb ends it. The other kinds keep to what a person has decided about them.
var endings = map[commonv1.IncidentKind]string{
	kindClass: "it ends by itself an hour after the last such failure: repair what the error names",
	kindBrake: "`gpuaas brake release --reason TEXT` ends it with the brake; else it ends as the share falls",
	commonv1.IncidentKind_INCIDENT_KIND_CHURN_BUDGET: "it ends by itself once the budget has room again: find out why " +
		"the instances do not last",
	commonv1.IncidentKind_INCIDENT_KIND_MACHINE_UNREACHABLE: "it ends by itself once the machine is heard again or has " +
		"no workspace any more: restart its agent, or recreate its workspaces with a fenced proof",
	commonv1.IncidentKind_INCIDENT_KIND_CONTROL_PLANE_ROLLBACK: "`gpuaas rollback accept --reason TEXT` ends it with " +
		"rollback mode; docs/restore.md has what comes before",
	commonv1.IncidentKind_INCIDENT_KIND_SIGNING_KEYS: "it ends by itself ten minutes after the replica lacked the key " +
		"last: give it the file (`gpuaas keys list` names who holds it)",
	commonv1.IncidentKind_INCIDENT_KIND_STORAGE: "it ends by itself with the next measurement, within five minutes of " +
		"more room: give the database room, and set storage.limit_mebibytes to it (`gpuaas policy set`)",
	commonv1.IncidentKind_INCIDENT_KIND_ISSUER_UNTRUSTED: "it ends by itself once the ingress accepts a certificate of " +
		"the authority: `gpuaas ca status` names the side to repair",
}

var (
	lockIncident = pg.Define(pg.RoleRecovery, "fleet.lock_incident_by_id", `
		SELECT `+pg.Columns[incidentRow]("i")+` FROM recovery.incident i WHERE i.incident_id = $1 FOR UPDATE`)

	closeJudged = pg.Define(pg.RoleRecovery, "fleet.close_judged_incident", `
		UPDATE recovery.incident i SET closed_at = $2, closed_by = $3, close_reason = $4, version = i.version + 1
		WHERE i.incident_id = $1 RETURNING `+pg.Columns[incidentRow]("i"))
)

// CloseIncident closes an incident on a person's judgement. It is refused for a kind that only its evidence or another
// verb ends, and for one that would be opened again at once. Repeated by the person who closed the incident it changes
// nothing and returns the incident, with the first reason and without a position.
func (f *Fleet) CloseIncident(ctx context.Context,
	req *recoveryv1.CloseIncidentRequest,
) (*recoveryv1.CloseIncidentResponse, error) {
	out := &recoveryv1.CloseIncidentResponse{}
	by := rpc.ActorFrom(ctx)
	again := false
	err := pg.InTx(ctx, f.deps.Pool, func(ctx context.Context, tx pgx.Tx) error {
		// Rounds that open incidents or go on with them take these locks before they read any. One that waits for this
		// transaction reads the closed incident, and one before it has named all nodes that it judged.
		for _, lock := range []int64{driftLock, overdueLock} {
			if _, err := pg.Exec(ctx, tx, takeDriftLock, lock); err != nil {
				return fmt.Errorf("take the locks of rounds: %w", err)
			}
		}
		row, err := pg.One[incidentRow](ctx, tx, lockIncident, req.GetIncidentId())
		switch {
		case pg.IsNoRows(err):
			return fault.NoSuch("incident", req.GetIncidentId(),
				fault.Remedy("`gpuaas incidents list` shows the open ones, and those that are closed with --all"))
		case err != nil:
			return fmt.Errorf("read the incident: %w", err)
		}
		if err := row.unread(); err != nil {
			return fault.New(commonv1.Reason_REASON_RECORD_UNREADABLE, "", fault.Cause(err))
		}
		was := row.read(ctx)
		if err := mayClose(ctx, was); err != nil {
			return err
		}
		if again = was.ClosedAt != nil && was.ClosedBy == by; again {
			out.Incident = was.Proto()
			return nil
		}
		if err := f.closable(ctx, tx, was); err != nil {
			return err
		}
		now, err := Clock(ctx, tx)
		if err != nil {
			return err
		}
		i, err := readIncident(ctx, tx, closeJudged, row.ID, now, by, req.GetReason())
		if err != nil {
			return fmt.Errorf("write the closed incident: %w", err)
		}
		out.Incident = i.Proto()
		entry := incident.Entry(out.GetIncident(), "incident.close", by)
		entry.Reason, entry.Details["summary"] = req.GetReason(), i.Summary
		if _, err := audit.Record(ctx, tx, entry); err != nil {
			return err
		}
		out.Pos, err = events.Append(ctx, tx, incident.Event(out.GetIncident()))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("close the incident: %w", err)
	}
	if again {
		return out, nil
	}
	f.deps.Wake.Notify()
	f.deps.Logger.WarnContext(ctx, "an incident was closed by a person", slog.String("by", by),
		slog.String("reason", req.GetReason()), slog.String("incident_id", req.GetIncidentId()),
		slog.String("kind", names.Of(out.GetIncident().GetKind())))
	return out, nil
}

// mayClose returns the refusal of a person without the role that the incident needs; nil if the person has it.
func mayClose(ctx context.Context, i *Incident) error {
	person, _ := rpc.PersonFrom(ctx)
	if i.ofSecurity() && !slices.Contains(person.Roles, roleSecurity) {
		return fault.New(commonv1.Reason_REASON_PERMISSION_DENIED,
			"the incident is about an identity that may have a second holder: the security role closes it",
			fault.Unmet("it needs the role "+roleSecurity+"; you have "+strings.Join(person.Roles, ", ")),
			fault.Remedy("ask a person with the security role to judge it; fencing its nodes is theirs too"))
	}
	return nil
}

// closable returns the refusal of an incident that is closed, or that a person cannot close, or not now; nil for any
// other.
func (f *Fleet) closable(ctx context.Context, tx pgx.Tx, i *Incident) error {
	if i.ClosedAt != nil {
		at := i.ClosedAt.UTC().Format(time.RFC3339)
		text := fmt.Sprintf("the incident ended by itself at %s, without a person", at)
		if i.CloseReason != "" {
			text = fmt.Sprintf("the incident is closed since %s, by %s: %s", at, i.ClosedBy, i.CloseReason)
		}
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, text, fault.Unmet("the incident is not open"),
			fault.Remedy("nothing is to be done"))
	}
	switch i.Kind {
	case kindDrift, kindOverdue, kindSuspected:
	default: // of any other kind another would be opened while its evidence stands
		ends := cmp.Or(endings[i.Kind], "it ends by itself once its evidence does")
		return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED,
			"an incident of the kind "+names.Of(i.Kind)+" is not closed by a person",
			fault.Unmet("its evidence stands: "+i.Summary), fault.Remedy(ends))
	}
	if i.Kind != kindDrift {
		return nil
	}
	n, err := pg.One[equals](ctx, tx, countEquals, i.Key, driftWindow.Seconds())
	if err != nil {
		return fmt.Errorf("count equal verdicts: %w", err)
	}
	most, err := mostExpected(ctx, tx, n.Lately, f.deps.Policy.Current().BrakeFleetFraction())
	if err != nil || n.Lately <= most {
		return err
	}
	return fault.New(commonv1.Reason_REASON_PRECONDITION_FAILED, "the incident would be opened again at once",
		fault.Unmet(fmt.Sprintf("%d nodes began to have the reason %s within the last %s, and %d may", n.Lately, i.Key,
			driftWindow, most)),
		fault.Remedy("find what these nodes share; close it once no more of them begin to have the reason"),
		fault.RetryAfter(driftWindow))
}

// ofSecurity reports whether the incident is for security to judge: of a suspicion about identities, of one node or of
// many.
func (i *Incident) ofSecurity() bool {
	if i.Kind != kindDrift {
		return i.Kind == kindSuspected
	}
	reason, err := names.Parse[commonv1.DriftReason](i.Key)
	return err == nil && fault.Suspicion(reason)
}
