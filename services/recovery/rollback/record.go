package rollback

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
)

// reporterName is recorded as the setter of the mode when evidence sets it.
const reporterName = "recovery"

// moment is the database's time and era.
type moment struct {
	Now time.Time `db:"now"`
	Era int64     `db:"era"`
}

var (
	readMoment = pg.Define(pg.RoleRecovery, "rollback.read_moment", `SELECT mesh.clock() AS now, era FROM mesh.era`)
	readClock  = pg.Define(pg.RoleRecovery, "rollback.read_clock", `SELECT mesh.clock()`)
	raiseEra   = pg.Define(pg.RoleRecovery, "rollback.raise_era", `SELECT mesh.raise_era_after_rollback($1)`)
)

// Record stores evidence, and sets the mode if any of it is not of an earlier era than the database's. It returns the
// mode, and whether this call set it. Evidence that was stored within evidenceEvery is not written again. The caller
// must have locked the rows that the evidence is about; the rollback row is locked after them, and before the authority
// lock.
func Record(ctx context.Context, tx pgx.Tx, evidence ...Evidence) (*Mode, bool, error) {
	mode, err := lock(ctx, tx)
	if err != nil {
		return nil, false, err
	}
	at, err := pg.One[moment](ctx, tx, readMoment)
	if err != nil {
		return nil, false, fmt.Errorf("read clock and era: %w", err)
	}
	now, era := at.Now, at.Era
	set, seenEra := false, mode.seenEra
	var counts []Evidence
	for _, e := range evidence {
		if e.Era < era && !mode.Active {
			continue // the consequence of a restore that is known and accepted
		}
		if !mode.Active {
			set = true
			*mode = Mode{Active: true, Since: &now, Era: era, ReportedBy: reporterName, Version: mode.Version, seenEra: -1}
		}
		counts = append(counts, e)
		if e.Era >= era {
			mode.seenEra = max(mode.seenEra, e.Era)
		}
	}
	if !mode.Active {
		return mode, false, nil
	}
	changed, err := mode.add(ctx, tx, counts, now)
	if err != nil {
		return nil, false, err
	}
	if !set && !changed && mode.seenEra == seenEra && mode.IncidentID != "" {
		return mode, false, nil
	}
	if err := report(ctx, tx, mode, now); err != nil {
		return nil, false, err
	}
	if err := mode.save(ctx, tx); err != nil {
		return nil, false, err
	}
	if set {
		first := mode.evidence[0]
		_, err := audit.Record(ctx, tx, audit.Entry{
			Action: "rollback.enter", Reason: first.Detail, SubjectType: "rollback", SubjectID: subject,
			Details: map[string]any{
				"evidence": first.Kind, "subject": first.Subject, "era": mode.Era,
				"incident_id": mode.IncidentID,
			},
		})
		if err != nil {
			return nil, false, err
		}
	}
	return mode, set, nil
}

// EraOf returns the era in which a number was drawn.
func EraOf(number int64) int64 { return number >> eraShift }

// eraShift is how far an era stands above the numbers of the one before; it is the same arithmetic as mesh.next(n) in
// SQL.
const eraShift = 40

// accept ends the mode on a person's decision, and raises the era above that of all evidence. It returns the position
// of the incident's event.
func accept(ctx context.Context, tx pgx.Tx, mode *Mode, by, reason string) (string, error) {
	now, err := pg.Value[time.Time](ctx, tx, readClock)
	if err != nil {
		return "", fmt.Errorf("read clock: %w", err)
	}
	before := mode.Era
	// A restore that was just declared may have no incident yet. It is opened here, so that both the beginning and the end
	// of the mode are recorded.
	if err := report(ctx, tx, mode, now); err != nil {
		return "", err
	}
	if mode.Era, err = pg.Value[int64](ctx, tx, raiseEra, "rollback accepted: "+reason); err != nil {
		return "", fmt.Errorf("raise era: %w", err)
	}
	_, err = audit.Record(ctx, tx, audit.Entry{
		Action: "rollback.accept", Actor: by, Reason: reason, SubjectType: "rollback", SubjectID: subject,
		Details: map[string]any{
			"declared": mode.Declared, "era_before": before, "era": mode.Era, "evidence": mode.total,
			"incident_id": mode.IncidentID,
		},
	})
	if err != nil {
		return "", err
	}
	pos, err := closeIncident(ctx, tx, by, reason, now)
	if err != nil {
		return "", err
	}
	if _, err := pg.Exec(ctx, tx, forgetEvidence); err != nil {
		return "", fmt.Errorf("forget evidence of rollback mode: %w", err)
	}
	mode.Active, mode.AcceptedAt, mode.AcceptedBy, mode.AcceptReason = false, &now, by, reason
	return pos, mode.save(ctx, tx)
}

// summary returns the summary of the mode's incident.
func (m *Mode) summary() string {
	if m.Declared {
		text := "the database was restored from a backup"
		if m.Reason != "" {
			text += " (" + m.Reason + ")"
		}
		return text + ": rollback mode is active until it is accepted"
	}
	nodes, ahead, behind := false, false, false
	for _, s := range m.evidence {
		nodes = nodes || s.Kind == names.Of(nodeAhead)
		ahead = ahead || s.Kind == names.Of(launchLogAhead)
		behind = behind || s.Kind == names.Of(launchLogBehind)
	}
	var what string
	switch {
	case nodes && ahead:
		what = "nodes and the launch log remember more than the database"
	case nodes:
		what = "nodes remember more than the database"
	case ahead:
		what = "the launch log remembers more than the database"
	}
	if behind {
		if what != "" {
			what += ", and "
		}
		what += "the launch log lacks what the database knows"
	}
	return what + ": one of them was restored from a backup and the restore was not declared; rollback mode is active " +
		"until it is accepted"
}
