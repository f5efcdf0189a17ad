package view_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
	"github.com/gpuaas/mesh/services/readmodel/list"
	"github.com/gpuaas/mesh/services/readmodel/view"
)

// TestAuditNamesItsSubjects: a subject that has a name is returned with it, to people who may see the subject.
func TestAuditNamesItsSubjects(t *testing.T) {
	k := newKit(t)
	db := k.DB.Pool(pg.RoleReadmodel)
	person := ids.New()
	_, err := db.Exec(testkit.Context(t), `INSERT INTO readmodel.person (person_id, name, tenant_id, roles, expires_at)
		VALUES ($1, 'robot', $2, '{tenant}', mesh.clock() + interval '1 hour')`, person, k.A.ID)
	if err != nil {
		t.Fatal(err)
	}
	of := "alpha/" + k.A.WorkspaceName
	subjects := []struct{ kind, id, name, tenants string }{
		{"tenant", k.A.ID, "alpha", "alpha"},
		{"person", person, "robot", "robot"},
		{"person", "robot", "", ""},
		{"instance", k.A.InstanceID, of, of},
		{"allocation", k.A.AllocationID, of, ""},
		{"task", k.A.TaskID, k.A.NodeName, ""},
		{"run", k.A.RunID, of, of},
		{"tenant", ids.New(), "", ""},
		{"policy", "saga.retry_limit", "", ""},
		{"tenant", k.B.ID, "beta", ""},
		{"instance", k.B.InstanceID, "beta/" + k.B.WorkspaceName, ""},
	}
	events := make([]string, len(subjects))
	for i, s := range subjects {
		events[i] = ids.New()
		entry := fmt.Sprintf(`{"action": "some.thing", "subject_type": %q, "subject_id": %q, "tenant_id": %q}`, s.kind, s.id,
			k.A.ID)
		_, err := db.Exec(testkit.Context(t),
			`INSERT INTO readmodel.audit (number, pos, event_id, source, entry, previous_hash, hash)
			VALUES ($1::bigint, $2, $3, 'lifecycle', $4, sha256('x'),
				sha256(convert_to($1::text, 'UTF8')))`, i+1, 1<<40+i, events[i], entry)
		if err != nil {
			t.Fatal(err)
		}
	}
	for who, scope := range map[string]list.Scope{"operator": list.All(), "tenant": scopeOf(t, k.A.ID)} {
		err := k.read(scope, func(ctx context.Context, s *view.Snapshot) error {
			items, _, err := s.Audit(ctx, view.AuditFilter{Action: "some."}, list.Page{})
			got, want := map[string]string{}, map[string]string{}
			for _, a := range items {
				got[a.GetEventId()] = a.GetSubjectName()
			}
			for i, s := range subjects {
				want[events[i]] = s.name
				if who == "tenant" {
					want[events[i]] = s.tenants
				}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: %s", who, diff)
			}
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", who, err)
		}
	}
}

// TestTenantsSeeTheReasonsOfTheirOwnPeople: a person of the operator, whose name a person of the tenant may have got
// later, writes reasons for the operator's people.
func TestTenantsSeeTheReasonsOfTheirOwnPeople(t *testing.T) {
	k := newKit(t)
	db := k.DB.Pool(pg.RoleReadmodel)
	_, err := db.Exec(testkit.Context(t), `INSERT INTO readmodel.person (person_id, name, tenant_id, roles, expires_at)
		VALUES ($1, 'robot', $2, '{tenant}', mesh.clock() + interval '1 hour'),
			($3, 'other', $4, '{tenant}', mesh.clock() + interval '1 hour'),
			($5, 'olga', NULL, '{operator}', mesh.clock() + interval '1 hour')`,
		ids.New(), k.A.ID, ids.New(), k.B.ID, ids.New())
	if err != nil {
		t.Fatal(err)
	}
	later, before := time.Now().Add(time.Hour).UTC().Format(time.RFC3339), "2020-01-01T00:00:00Z"
	entries := []struct{ actor, at, want string }{
		{"robot", later, "because"}, {"robot", before, ""}, {"other", later, ""}, {"olga", later, ""}, {"", later, ""},
	}
	events := make([]string, len(entries))
	for i, e := range entries {
		events[i] = ids.New()
		entry := fmt.Sprintf(`{"action": "some.thing", "actor": %q, "at": %q, "reason": "because", "tenant_id": %q}`,
			e.actor, e.at, k.A.ID)
		_, err := db.Exec(testkit.Context(t),
			`INSERT INTO readmodel.audit (number, pos, event_id, source, entry, previous_hash, hash)
			VALUES ($1::bigint, $2, $3, 'lifecycle', $4, sha256('x'),
				sha256(convert_to($1::text, 'UTF8')))`, i+1, 1<<40+i, events[i], entry)
		if err != nil {
			t.Fatal(err)
		}
	}
	for who, scope := range map[string]list.Scope{"operator": list.All(), "tenant": scopeOf(t, k.A.ID)} {
		err := k.read(scope, func(ctx context.Context, s *view.Snapshot) error {
			items, _, err := s.Audit(ctx, view.AuditFilter{Action: "some."}, list.Page{})
			if len(items) != len(entries) {
				t.Errorf("%s: %d entries", who, len(items))
			}
			for _, a := range items {
				e, want := entries[slices.Index(events, a.GetEventId())], "because"
				if who == "tenant" {
					want = e.want
				}
				if got := a.GetEntry().GetReason(); got != want {
					t.Errorf("%s sees %q of %q at %s, want %q", who, got, e.actor, e.at, want)
				}
			}
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", who, err)
		}
	}
}

// Scenario: entries of two tenants take turns in the log. A person of one reads each of that tenant's entries once,
// page by page, and neither an entry nor a page token tells how many entries the other tenant has between them.
func TestATenantCannotCountTheAuditEntriesOfOthers(t *testing.T) {
	k := newKit(t)
	db := k.DB.Pool(pg.RoleReadmodel)
	const first = 7_000_000_001
	var mine []string
	for i := range 10 {
		tenant, event := k.B.ID, ids.New()
		if i%3 == 0 {
			tenant, mine = k.A.ID, append(mine, event)
		}
		entry := fmt.Sprintf(`{"action": "some.thing", "tenant_id": %q}`, tenant)
		_, err := db.Exec(testkit.Context(t),
			`INSERT INTO readmodel.audit (number, pos, event_id, source, entry, previous_hash, hash)
			VALUES ($1::bigint, $2, $3, 'lifecycle', $4, sha256('x'),
				sha256(convert_to($1::text, 'UTF8')))`, first+i, 1<<40+i, event, entry)
		if err != nil {
			t.Fatal(err)
		}
	}
	slices.Reverse(mine)
	for who, scope := range map[string]list.Scope{"operator": list.All(), "tenant": scopeOf(t, k.A.ID)} {
		var read []string
		for page := (list.Page{Size: 1}); ; {
			var items []*readmodelv1.AuditRow
			err := k.read(scope, func(ctx context.Context, s *view.Snapshot) error {
				var err error
				items, page.Token, err = s.Audit(ctx, view.AuditFilter{Action: "some."}, page)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			for _, a := range items {
				if a.GetEntry().GetTenantId() == k.A.ID {
					read = append(read, a.GetEventId())
				}
				if hidden := a.GetNumber() == 0 && a.GetHash() == "" && a.GetPreviousHash() == ""; hidden != (who == "tenant") {
					t.Errorf("%s sees %v", who, a)
				}
			}
			token, err := base64.RawURLEncoding.DecodeString(page.Token)
			if err != nil {
				t.Fatal(err)
			}
			if who == "tenant" && strings.Contains(string(token), "70000000") {
				t.Errorf("a page token of a tenant is %s", token)
			}
			if page.Token == "" {
				break
			}
		}
		if diff := cmp.Diff(mine, read); diff != "" {
			t.Errorf("%s: %s", who, diff)
		}
	}
}
