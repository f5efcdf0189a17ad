package view

import (
	"context"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/services/readmodel/project"
)

// AuditFilter narrows a list of audit entries. Zero fields do not.
type AuditFilter struct {
	WorkspaceID, NodeID string
	Action              string // a prefix
}

const auditList = "audit"

// Audit answers one page of the audit log, newest first.
func (s *Snapshot) Audit(ctx context.Context, f AuditFilter, page Page) ([]*readmodelv1.AuditRow, string, error) {
	l := listing{}
	l.and("(?::text IS NULL OR a.tenant_id = $1)", s.scope.arg())
	if f.WorkspaceID != "" {
		l.and("a.workspace_id = ?", f.WorkspaceID)
	}
	if f.NodeID != "" {
		l.and("a.node_id = ?", f.NodeID)
	}
	if f.Action != "" {
		l.and("a.action LIKE ?", likePrefix(f.Action))
	}
	if page.Token != "" {
		c, err := decodeCursor(auditList, page.Token)
		if err != nil {
			return nil, "", err
		}
		before, err := strconv.ParseInt(c.Sort, 10, 64)
		if err != nil {
			return nil, "", fault.New(commonv1.Reason_REASON_INVALID_ARGUMENT, "the page token is none of this list's",
				fault.Unmet("page_token: not from this list"), fault.Cause(err))
		}
		l.and("a.number < ?", before)
	}
	limit := page.limit()
	rows, err := s.tx.Query(ctx, fmt.Sprintf(`SELECT a.number, a.event_id::text, a.source, a.entry, a.previous_hash, a.hash FROM readmodel.audit a
		WHERE %s ORDER BY a.number DESC LIMIT %d`, strings.Join(l.where, " AND "), limit+1), l.args...)
	if err != nil {
		return nil, "", fmt.Errorf("list audit entries: %w", err)
	}
	items, err := pgx.CollectRows(rows, scanAudit)
	if err != nil {
		return nil, "", fmt.Errorf("list audit entries: %w", err)
	}
	next := ""
	if len(items) > limit {
		items = items[:limit]
		last := items[limit-1]
		next = cursor{List: auditList, Sort: strconv.FormatInt(last.GetNumber(), 10), ID: last.GetEventId()}.encode()
	}
	if err := s.nameSubjects(ctx, items); err != nil {
		return nil, "", err
	}
	return namedPage(ctx, s, func(a *readmodelv1.AuditRow) nameless {
		return nameless{
			workspaceID: subjectOf(a, "workspace", a.GetEntry().GetWorkspaceId()), nodeID: subjectOf(a, "node", a.GetEntry().GetNodeId()),
			workspace: &a.Workspace, node: &a.NodeName,
		}
	}, items, next, nil)
}

// subjects are the kinds of subjects, beside workspaces and nodes, that have names.
var subjects = map[string]readmodelv1.ObjectKind{
	"tenant": readmodelv1.ObjectKind_OBJECT_KIND_TENANT, "instance": readmodelv1.ObjectKind_OBJECT_KIND_INSTANCE,
	"allocation": readmodelv1.ObjectKind_OBJECT_KIND_ALLOCATION, "task": readmodelv1.ObjectKind_OBJECT_KIND_TASK,
	"claim": readmodelv1.ObjectKind_OBJECT_KIND_CLAIM, "run": readmodelv1.ObjectKind_OBJECT_KIND_RUN,
}

// person finds the names of people. One is a subject by the name, and by the id where a person gave that.
var person = object{table: "person", id: "person_id", name: "x.name", tenants: true}

// nameSubjects fills in the names of the subjects of one page, as far as the scope meets them: one query for each kind.
func (s *Snapshot) nameSubjects(ctx context.Context, items []*readmodelv1.AuditRow) error {
	byKind := map[string][]string{}
	for _, a := range items {
		if kind, id := a.GetEntry().GetSubjectType(), a.GetEntry().GetSubjectId(); isUUID(id) {
			byKind[kind] = append(byKind[kind], id)
		}
	}
	found := map[string]map[string]string{}
	for kind, wanted := range byKind {
		o := person
		if kind != "person" {
			o = objects[subjects[kind]]
		}
		if o.table == "" || !s.scope.Everything() && !o.tenants {
			continue
		}
		where, args := "x."+o.id+" = ANY($1::uuid[])", []any{wanted}
		if !s.scope.Everything() {
			where, args = where+" AND x.tenant_id = $2::uuid", append(args, s.scope.arg())
		}
		rows, err := s.tx.Query(ctx, o.selects()+where, args...)
		if err != nil {
			return fmt.Errorf("name subjects: %w", err)
		}
		names := map[string]string{}
		var id, name string
		if _, err := pgx.ForEachRow(rows, []any{&id, &name}, func() error { names[id] = name; return nil }); err != nil {
			return fmt.Errorf("name subjects: %w", err)
		}
		found[kind] = names
	}
	for _, a := range items {
		a.SubjectName = found[a.GetEntry().GetSubjectType()][strings.ToLower(a.GetEntry().GetSubjectId())]
	}
	return nil
}

// subjectOf is the id of a kind that an entry is about: the entry's own, else its subject's.
func subjectOf(a *readmodelv1.AuditRow, kind, id string) string {
	if id == "" && a.GetEntry().GetSubjectType() == kind {
		return a.GetEntry().GetSubjectId()
	}
	return id
}

func likePrefix(prefix string) string {
	return strings.NewReplacer(`\`, `\\`, "%", `\%`, "_", `\_`).Replace(prefix) + "%"
}

func scanAudit(row pgx.CollectableRow) (*readmodelv1.AuditRow, error) {
	a := &readmodelv1.AuditRow{Entry: &commonv1.AuditEntry{}}
	var entry string
	var previous, hash []byte
	if err := row.Scan(&a.Number, &a.EventId, &a.Source, &entry, &previous, &hash); err != nil {
		return nil, err //nolint:wrapcheck // wrapped by the caller
	}
	a.PreviousHash, a.Hash = hex.EncodeToString(previous), hex.EncodeToString(hash)
	return a, project.Decode([]byte(entry), a.GetEntry())
}
