package view

import (
	"context"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/lookup"
)

// AuditFilter narrows a list of audit entries. Zero fields do not.
type AuditFilter struct {
	WorkspaceID, NodeID string
	Action              string // a prefix
}

const auditList = "audit"

// The indexes leave out the entries without a tenant, a workspace or a node. A plan that serves all arguments can use
// them only if the statement excludes these entries too.
const (
	auditOfTenants   list.Condition = "a.tenant_id <> ''"
	auditOfWorkspace list.Condition = "a.workspace_id = ? AND a.workspace_id <> ''"
	auditOfNode      list.Condition = "a.node_id = ? AND a.node_id <> ''"
	auditOfAction    list.Condition = "a.action LIKE ?"
	auditBefore      list.Condition = "a.number < ?"
	// An entry that was cut has none before it.
	auditBeforeEntry list.Condition = "a.number < (SELECT b.number FROM readmodel.audit b WHERE b.event_id = ?::uuid)"
)

var auditConditions = []list.Condition{
	auditOfTenants, auditOfWorkspace, auditOfNode, auditOfAction, auditBefore, auditBeforeEntry,
}

type auditRow struct {
	Number   int64  `db:"number"`
	EventID  string `db:"event_id" expr:"@.event_id::text"`
	Source   string `db:"source"`
	Entry    string `db:"entry"`
	Previous []byte `db:"previous_hash"`
	Hash     []byte `db:"hash"`
}

var listAudit = pg.DefineDynamic(pg.RoleReadmodel, "view.list_audit", func(p list.Parts) string {
	where, n := list.Where(auditList, list.Tenancy{Column: "a.tenant_id", One: p.Scoped}, 1, p.Conditions, auditConditions)
	return "SELECT " + pg.Columns[auditRow]("a") + " FROM readmodel.audit a" + where + " ORDER BY a.number DESC LIMIT $" +
		strconv.Itoa(n+1)
}, list.Parts{}, list.Parts{Conditions: auditConditions}, list.Parts{Scoped: true},
	list.Parts{Conditions: auditConditions, Scoped: true})

// Audit returns one page of the audit log, newest first. A scope that is bound to a tenant does not include entries
// about nodes, so that a page of it may be shorter than others, and sees reasons only of the tenant's own people.
func (s *Snapshot) Audit(ctx context.Context, f AuditFilter, page list.Page) ([]*readmodelv1.AuditRow, string, error) {
	l := list.Request{Args: []any{s.scope.Arg()}}
	l.When(!s.scope.Everything(), auditOfTenants)
	l.When(f.WorkspaceID != "", auditOfWorkspace, f.WorkspaceID)
	l.When(f.NodeID != "", auditOfNode, f.NodeID)
	l.When(f.Action != "", auditOfAction, likePrefix(f.Action))
	if page.Token != "" {
		c, err := list.DecodeCursor(auditList, page.Token)
		if err != nil {
			return nil, "", err
		}
		if err := s.after(&l, c); err != nil {
			return nil, "", err
		}
	}
	limit := page.Limit()
	rows, err := pg.All[auditRow](ctx, s.tx, listAudit.For(list.Parts{Conditions: l.Where, Scoped: !s.scope.Everything()}),
		append(l.Args, limit+1)...)
	if err != nil {
		return nil, "", fmt.Errorf("list audit entries: %w", err)
	}
	items := make([]*readmodelv1.AuditRow, 0, len(rows))
	for _, row := range rows {
		entry, err := decode[commonv1.AuditEntry]([]byte(row.Entry))
		if err != nil {
			return nil, "", fmt.Errorf("list audit entries: %w", err)
		}
		items = append(items, &readmodelv1.AuditRow{
			Number: row.Number, EventId: row.EventID, Source: row.Source, Entry: entry,
			PreviousHash: hex.EncodeToString(row.Previous), Hash: hex.EncodeToString(row.Hash),
		})
	}
	next := ""
	if len(items) > limit {
		items = items[:limit]
		last := items[limit-1]
		c := list.Cursor{List: auditList, ID: last.GetEventId()}
		if s.scope.Everything() {
			c.Sort = strconv.FormatInt(last.GetNumber(), 10)
		}
		next = c.Encode()
	}
	if err := s.nameSubjects(ctx, items); err != nil {
		return nil, "", err
	}
	if !s.scope.Everything() {
		items = slices.DeleteFunc(items, ofMachine)
		if err := s.hideReasons(ctx, items); err != nil {
			return nil, "", err
		}
	}
	return namePage(ctx, s, func(a *readmodelv1.AuditRow) lookup.Nameless {
		return lookup.Nameless{
			WorkspaceID: subjectOf(a, "workspace", a.GetEntry().GetWorkspaceId()),
			NodeID:      subjectOf(a, "node", a.GetEntry().GetNodeId()), Workspace: &a.Workspace, Node: &a.NodeName,
		}
	}, items, next, nil)
}

// after adds the condition of the entries behind a cursor. A tenant's cursor has the entry alone, because the number of
// an entry counts those of others.
func (s *Snapshot) after(l *list.Request, c list.Cursor) error {
	if !s.scope.Everything() {
		l.And(auditBeforeEntry, c.ID)
		return nil
	}
	before, err := strconv.ParseInt(c.Sort, 10, 64)
	if err != nil {
		return fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the page token is none of this list's",
			fault.Unmet("page_token: not from this list"), fault.Cause(err))
	}
	l.And(auditBefore, before)
	return nil
}

// ofMachine reports whether an entry is about a node, which is for people of the operator.
func ofMachine(a *readmodelv1.AuditRow) bool {
	return a.GetEntry().GetSubjectType() == "node" || strings.HasPrefix(a.GetEntry().GetAction(), "node.")
}

// personSince is a person by name, and since when that name is theirs.
type personSince struct {
	Name  string    `db:"name"`
	Since time.Time `db:"since" expr:"p.created_at"`
}

var peopleOfTenant = pg.Define(pg.RoleReadmodel, "view.people_of_tenant", `
	SELECT `+pg.Columns[personSince]("p")+` FROM readmodel.person p
	WHERE p.ended_at IS NULL AND p.name = ANY($1::text[]) AND p.tenant_id = $2::uuid`)

// hideReasons clears the reasons that were given by others than the people whom the scope's tenant has now: people of
// the operator write of machines, by whatever name they know them.
func (s *Snapshot) hideReasons(ctx context.Context, items []*readmodelv1.AuditRow) error {
	var actors []string
	for _, a := range items {
		if e := a.GetEntry(); e.GetReason() != "" && !slices.Contains(actors, e.GetActor()) {
			actors = append(actors, e.GetActor())
		}
	}
	if len(actors) == 0 {
		return nil
	}
	rows, err := pg.All[personSince](ctx, s.tx, peopleOfTenant, actors, s.scope.TenantID())
	if err != nil {
		return fmt.Errorf("read the people of a tenant: %w", err)
	}
	since := make(map[string]time.Time, len(rows))
	for _, p := range rows {
		since[p.Name] = p.Since
	}
	for _, a := range items {
		e := a.GetEntry()
		if from, ok := since[e.GetActor()]; !ok || e.GetAt() == nil || e.GetAt().AsTime().Before(from) {
			e.Reason = ""
		}
	}
	return nil
}

// nameSubjects fills in the names of the subjects of one page, if the scope includes them: one query for each kind.
func (s *Snapshot) nameSubjects(ctx context.Context, items []*readmodelv1.AuditRow) error {
	byKind := map[string][]string{}
	for _, a := range items {
		if kind, id := a.GetEntry().GetSubjectType(), a.GetEntry().GetSubjectId(); list.IsID(id) {
			byKind[kind] = append(byKind[kind], id)
		}
	}
	found, err := s.find().SubjectNames(ctx, byKind)
	if err != nil {
		return err
	}
	for _, a := range items {
		a.SubjectName = found[a.GetEntry().GetSubjectType()][strings.ToLower(a.GetEntry().GetSubjectId())]
	}
	return nil
}

// subjectOf returns the id of the object of a kind that an entry is about: id, or else the id of its subject if that is
// of the kind.
func subjectOf(a *readmodelv1.AuditRow, kind, id string) string {
	if id == "" && a.GetEntry().GetSubjectType() == kind {
		return a.GetEntry().GetSubjectId()
	}
	return id
}

func likePrefix(prefix string) string {
	return strings.NewReplacer(`\`, `\\`, "%", `\%`, "_", `\_`).Replace(prefix) + "%"
}
