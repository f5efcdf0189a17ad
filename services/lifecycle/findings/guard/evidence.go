package guard

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/lifecycle/findings/finding"
)

const (
	nextTaken = "compare before and after: if no operation has gone on since, set the row back by hand; else correct " +
		"what is wrong by an operation of its own, " +
		"and acknowledge the finding with gpuaas findings acknowledge; then look at who could have changed it. No " +
		"operation that goes on ends it"
	nextPutBack = "nothing is left to put back: look at who changed it and why; the finding ends with the next sweep"
)

// How a row was written outside the product, as its trigger recorded it.
const (
	opDelete   = "delete"
	opUnsealed = "unsealed" // while the trigger did not fire: the trigger noticed it at the next write
)

// deviceField is the prefix of the fields of an allocation's evidence that describe its devices; the value of such a
// field is the node.
const deviceField = "device "

// mostListed is how many changes of a row a finding lists one by one.
const mostListed = 5

// change is the change of one field by hand: its value before the first change, and after the last.
type change struct{ before, after any }

// trace is the evidence of one row that no finding has settled, in the order of its making.
type trace struct {
	rowType, id string
	ids         []int64
	fields      map[string]change
	// was and is are true if the row existed before the first change and after the last.
	was, is bool
	// blind is true if the row's content before a change that no trigger saw is not known.
	blind   bool
	changes []map[string]any // the first, and the last ones
	leftOut int              // how many there are between them
	last    string           // by whom, with what and when the last change was made
	image   map[string]any
	version string // of the row, as the last of the changes left it
}

func (tr *trace) key() finding.Key {
	return finding.Key{Kind: names.Of(RowChanged), SubjectType: tr.rowType, SubjectID: tr.id}
}

func (tr *trace) add(e evidence) error {
	before, err := decode(e.Before)
	if err != nil {
		return err
	}
	after, err := decode(e.After)
	if err != nil {
		return err
	}
	if len(tr.ids) == 0 {
		tr.was = before != nil || e.Op == opUnsealed
	}
	tr.ids, tr.is = append(tr.ids, e.ID), after != nil
	if tr.image = after; after == nil {
		tr.image = before
	}
	if before == nil && e.Op == opUnsealed {
		tr.blind = true
		before = after
	}
	tr.version = fmt.Sprint(tr.image["version"])
	all := maps.Clone(before)
	if all == nil {
		all = map[string]any{}
	}
	maps.Copy(all, after)
	for f := range all {
		if same(before[f], after[f]) {
			continue
		}
		c, known := tr.fields[f]
		if !known {
			c.before = before[f]
		}
		c.after = after[f]
		tr.fields[f] = c
	}
	one := map[string]any{"at": e.At.UTC().Format(time.RFC3339Nano), "how": e.Op}
	if e.Op == opUnsealed {
		tr.last = "by an unknown session while its trigger did not fire, noticed at " + e.At.UTC().Format(time.RFC3339)
	} else {
		one["by"], one["application"], one["client"], one["backend"], one["transaction"] = e.User, e.Application, e.Client,
			e.Backend, e.XID
		tr.last = fmt.Sprintf("by %s with %s (%s, backend %d, transaction %s) at %s", e.User,
			cmp.Or(e.Application, "an unnamed client"), e.Client, e.Backend, e.XID,
			e.At.UTC().Format(time.RFC3339))
	}
	if tr.changes = append(tr.changes, one); len(tr.changes) > mostListed {
		tr.changes, tr.leftOut = slices.Delete(tr.changes, 1, 2), tr.leftOut+1
	}
	if !tr.blind { // what a finding shows of a row whose fields are compared; maps of whole rows are not kept
		maps.DeleteFunc(tr.image, func(f string, _ any) bool { return !slices.Contains(shown, f) })
	}
	return nil
}

// shown are the fields of an image that a finding shows of any row.
var shown = []string{"workspace_id", "tenant_id", "node_id", "version"}

// net returns the changes by hand that remain: the fields that were not put back by hand. The writes of operations in
// between or afterwards do not count.
func (tr *trace) net() map[string]change {
	out := map[string]change{}
	for f, c := range tr.fields {
		if !same(c.before, c.after) {
			out[f] = c
		}
	}
	return out
}

func (tr *trace) putBack() bool { return !tr.blind && tr.was == tr.is && len(tr.net()) == 0 }

// seen returns the finding that follows from the evidence alone.
func (tr *trace) seen() finding.Seen {
	text := func(name string) string { v, _ := tr.image[name].(string); return v }
	x := finding.Seen{
		Kind: RowChanged, Severity: finding.P1, SubjectType: tr.rowType, SubjectID: tr.id, WorkspaceID: text("workspace_id"),
		TenantID: text("tenant_id"), NodeID: text("node_id"), NextAction: nextTaken, Certain: true, Evidence: tr.ids,
		Before: map[string]any{},
		After:  map[string]any{},
	}
	switch tr.rowType {
	case "workspace":
		x.WorkspaceID = tr.id
	case "allocation":
		x.AllocationID = tr.id
	}
	fields := tr.net()
	what := list(sortedKeys(fields))
	switch {
	case tr.putBack():
		what, x.NextAction = list(sortedKeys(tr.fields))+", and put back", nextPutBack
	case !tr.was:
		what = "it was inserted"
	case !tr.is:
		what = "it was deleted"
	case tr.blind:
		what = "what it was before is not known"
	}
	for f, c := range fields {
		x.Before[f], x.After[f] = c.before, c.after
	}
	if tr.blind {
		maps.Copy(x.After, tr.image)
	}
	if !tr.was {
		x.Before = map[string]any{"row": nil}
	}
	if !tr.is {
		x.After = map[string]any{"row": nil}
	}
	x.After["changes"] = tr.listedChanges()
	x.Summary = changedOutside(tr.rowType, tr.id) + what + "; " + tr.last
	return x
}

// listedChanges returns the changes one by one: all of a few, else the first and the last ones.
func (tr *trace) listedChanges() []any {
	out := []any{}
	for i, c := range tr.changes {
		if i == 1 && tr.leftOut > 0 {
			out = append(out, map[string]any{"left_out": tr.leftOut})
		}
		out = append(out, c)
	}
	return out
}

// list joins fields in one line, at most eight of them.
func list(fields []string) string {
	const most = 8
	if len(fields) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(fields[:most], ", "), len(fields)-most)
	}
	return strings.Join(fields, ", ")
}

// withEvidence adds the evidence to what the detector saw of the rows. If a row was put back by hand and its seal fits,
// its evidence is settled, which ends the finding; but a change is reported once, however soon it was put back.
func (g *round) withEvidence(ctx context.Context, seen []finding.Seen, open map[finding.Key]bool, all bool,
) ([]finding.Seen, error) {
	traces, err := g.unsettled(ctx, all)
	if err != nil {
		return nil, err
	}
	var out []finding.Seen
	at := map[finding.Key]int{}
	add := func(x finding.Seen) {
		if i, there := at[x.Key()]; there {
			fold(&out[i], x)
			return
		}
		at[x.Key()] = len(out)
		out = append(out, x)
	}
	for _, x := range seen {
		add(x)
	}
	var settled []int64
	for _, tr := range traces {
		_, broken := at[tr.key()]
		if _, reported := open[tr.key()]; reported && !broken && tr.putBack() {
			settled = append(settled, tr.ids...)
			continue
		}
		add(tr.seen())
	}
	for i := range out {
		if out[i].Before, err = finding.HideSecrets(out[i].Before); err != nil {
			return nil, err
		}
		if out[i].After, err = finding.HideSecrets(out[i].After); err != nil {
			return nil, err
		}
	}
	return out, settle(ctx, g.db, settled, "put_back")
}

// fold adds another thing seen of the same row; values of the first take precedence.
func fold(s *finding.Seen, more finding.Seen) {
	s.Summary += "; " + strings.TrimPrefix(more.Summary, changedOutside(more.SubjectType, more.SubjectID))
	s.Evidence = append(s.Evidence, more.Evidence...)
	fill := func(to, from map[string]any) {
		for f, v := range from {
			if _, there := to[f]; !there || f == "version" {
				to[f] = v
			}
		}
	}
	fill(s.Before, more.Before)
	fill(s.After, more.After)
}

// openRow is the row of which a finding is open.
type openRow struct {
	Type   string `db:"subject_type"`
	ID     string `db:"subject_id"`
	Broken bool   `db:"broken"` // the finding reports a broken seal
}

var openOfKind = pg.Define(pg.RoleLifecycle, "guard.open_of_kind",
	`SELECT f.subject_type, f.subject_id, coalesce(f.after->>'seal' = $2, false) AS broken FROM lifecycle.finding f
		WHERE f.resolved_at IS NULL AND f.kind = $1`)

// openRows returns the rows of which a finding is open, with whether it reports a broken seal.
func (g *round) openRows(ctx context.Context) (map[finding.Key]bool, error) {
	kind := names.Of(RowChanged)
	list, err := pg.All[openRow](ctx, g.db, openOfKind, kind, SealBroken)
	if err != nil {
		return nil, fmt.Errorf("read open findings: %w", err)
	}
	out := map[finding.Key]bool{}
	for _, r := range list {
		out[finding.Key{Kind: kind, SubjectType: r.Type, SubjectID: r.ID}] = r.Broken
	}
	return out, nil
}

var settleEvidence = pg.Define(pg.RoleLifecycle, "guard.settle_evidence",
	`INSERT INTO lifecycle.row_evidence_settled (evidence_id, how) SELECT DISTINCT u, $2 FROM unnest($1::bigint[]) u
		ON CONFLICT DO NOTHING`)

// settle marks evidence as settled, so that it makes no further finding.
func settle(ctx context.Context, q pg.Querier, evidence []int64, how string) error {
	if len(evidence) == 0 {
		return nil
	}
	_, err := pg.Exec(ctx, q, settleEvidence, slices.Clone(evidence), how)
	if err != nil {
		return fmt.Errorf("settle evidence: %w", err)
	}
	return nil
}
