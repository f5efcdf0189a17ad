package lookup

import (
	"context"
	"fmt"
	"maps"
	"slices"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
)

// subjects are the kinds of subjects, beside workspaces and nodes, that have names.
var subjects = map[string]readmodelv1.ObjectKind{
	"tenant": readmodelv1.ObjectKind_OBJECT_KIND_TENANT, "instance": readmodelv1.ObjectKind_OBJECT_KIND_INSTANCE,
	"allocation": readmodelv1.ObjectKind_OBJECT_KIND_ALLOCATION, "task": readmodelv1.ObjectKind_OBJECT_KIND_TASK,
	"claim": readmodelv1.ObjectKind_OBJECT_KIND_CLAIM, "run": readmodelv1.ObjectKind_OBJECT_KIND_RUN,
}

// person is the object that names people. An entry has a person as its subject by name, or by id if the request gave
// the id.
var person = object{table: "person", id: "person_id", name: "x.name", tenants: true}

// subjectStatement selects a statement that names subjects.
type subjectStatement struct {
	of     object
	scoped bool
}

func subjectSamples() []subjectStatement {
	samples := []subjectStatement{{person, false}, {person, true}}
	for _, name := range slices.Sorted(maps.Keys(subjects)) {
		kind := subjects[name]
		samples = append(samples, subjectStatement{objects[kind], false})
		if objects[kind].tenants {
			samples = append(samples, subjectStatement{objects[kind], true})
		}
	}
	return samples
}

var namesOfSubjects = pg.DefineDynamic(pg.RoleReadmodel, "lookup.names_of_subjects", func(p subjectStatement) string {
	sql := p.of.selects() + "x." + p.of.id + " = ANY($1::uuid[])"
	if p.scoped {
		sql += " AND x.tenant_id = $2::uuid"
	}
	return sql
}, subjectSamples()...)

// SubjectNames returns the names of the subjects of audit entries that the scope includes, by kind and id. It takes
// their ids by kind, and needs one query for each kind.
func (f Finder) SubjectNames(ctx context.Context, byKind map[string][]string) (map[string]map[string]string, error) {
	found := map[string]map[string]string{}
	for kind, wanted := range byKind {
		o := person
		if kind != "person" {
			o = objects[subjects[kind]]
		}
		if o.table == "" || !f.scope.Everything() && !o.tenants {
			continue
		}
		args, scoped := []any{wanted}, !f.scope.Everything()
		if scoped {
			args = append(args, f.scope.Arg())
		}
		var err error
		if found[kind], err = list.Pairs(ctx, f.db, namesOfSubjects.For(subjectStatement{o, scoped}), args...); err != nil {
			return nil, fmt.Errorf("name subjects: %w", err)
		}
	}
	return found, nil
}
