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
	return namedPage(ctx, s, func(a *readmodelv1.AuditRow) nameless {
		return nameless{
			workspaceID: subjectOf(a, "workspace", a.GetEntry().GetWorkspaceId()), nodeID: subjectOf(a, "node", a.GetEntry().GetNodeId()),
			workspace: &a.Workspace, node: &a.NodeName,
		}
	}, items, next, nil)
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
