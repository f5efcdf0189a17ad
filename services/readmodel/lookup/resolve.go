package lookup

import (
	"context"
	"fmt"
	"slices"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/services/readmodel/list"
)

const (
	// Candidates is how many candidates for an ambiguous reference are returned at most.
	Candidates = 10
	// leastDigits is how many digits of an id are needed at least to refer to it.
	leastDigits = 6
	idDigits    = 32
)

// object describes how the objects of a kind are found by a part of their id. In name, x is the table.
type object struct {
	table, id string
	name      string // SQL expression for the name of an object: text, or NULL
	tenants   bool   // a person of a tenant may look them up
}

const (
	// nodeOf is the name of an object's node. It is a subquery for each object, because a join may read all nodes for one
	// object.
	nodeOf = "(SELECT n.name FROM readmodel.node n WHERE n.node_id = x.node_id)"
	// workspaceOf is the name of an object's workspace, if the workspace is of the same tenant as the object.
	workspaceOf = "(SELECT w.tenant || '/' || w.name FROM readmodel.workspace w WHERE w.workspace_id = x.workspace_id " +
		"AND w.tenant_id = x.tenant_id)"
)

var objects = map[readmodelv1.ObjectKind]object{
	readmodelv1.ObjectKind_OBJECT_KIND_NODE: {table: "node", id: "node_id", name: "x.name"},
	readmodelv1.ObjectKind_OBJECT_KIND_WORKSPACE: {
		table: "workspace", id: "workspace_id", name: "x.tenant || '/' || x.name", tenants: true,
	},
	readmodelv1.ObjectKind_OBJECT_KIND_TASK:       {table: "task", id: "task_id", name: nodeOf},
	readmodelv1.ObjectKind_OBJECT_KIND_ALLOCATION: {table: "allocation", id: "allocation_id", name: workspaceOf},
	readmodelv1.ObjectKind_OBJECT_KIND_INSTANCE: {
		table: "instance", id: "instance_id", name: workspaceOf, tenants: true,
	},
	readmodelv1.ObjectKind_OBJECT_KIND_TENANT:   {table: "tenant", id: "tenant_id", name: "x.name", tenants: true},
	readmodelv1.ObjectKind_OBJECT_KIND_CLAIM:    {table: "claim", id: "claim_id", name: "x.body->>'name'"},
	readmodelv1.ObjectKind_OBJECT_KIND_INCIDENT: {table: "incident", id: "incident_id", name: "x.body->>'summary'"},
	readmodelv1.ObjectKind_OBJECT_KIND_FINDING:  {table: "finding", id: "finding_id", name: "x.body->>'summary'"},
	readmodelv1.ObjectKind_OBJECT_KIND_RUN: {
		table: "run", id: "run_id", name: workspaceOf, tenants: true,
	},
	readmodelv1.ObjectKind_OBJECT_KIND_RECOVERY: {
		table: "recovery_record", id: "record_id", name: workspaceOf, tenants: true,
	},
}

// selects returns the start of a query for the id and the name of objects. of returns its end: restricted to the tenant
// $4 if scoped, and to at most $3 rows.
func (o object) selects() string {
	return fmt.Sprintf("SELECT x.%[2]s::text AS id, COALESCE(%[3]s, '') AS text FROM readmodel.%[1]s x WHERE ", o.table,
		o.id, o.name)
}

func (o object) of(scoped bool, order string) string {
	tenant := ""
	if scoped {
		tenant = " AND x.tenant_id = $4::uuid"
	}
	return tenant + " ORDER BY " + order + " LIMIT $3"
}

// partStatement selects a statement that finds objects by a part of their id.
type partStatement struct {
	of     object
	end    bool // by the end of the id; else by its beginning
	scoped bool
}

func (l partStatement) compose() string {
	if l.end {
		return l.of.byEnd(l.scoped)
	}
	return l.of.byBeginning(l.scoped)
}

func partSamples() []partStatement {
	var samples []partStatement
	for _, of := range objects {
		for _, end := range []bool{false, true} {
			samples = append(samples, partStatement{of, end, false})
			if of.tenants {
				samples = append(samples, partStatement{of, end, true})
			}
		}
	}
	return samples
}

var findByPart = pg.DefineDynamic(pg.RoleReadmodel, "lookup.find_by_part_of_id", partStatement.compose,
	partSamples()...)

// byBeginning returns the statement that finds ids from $1 to $2.
func (o object) byBeginning(scoped bool) string {
	return o.selects() + fmt.Sprintf("x.%s BETWEEN $1::uuid AND $2::uuid", o.id) + o.of(scoped, "x."+o.id)
}

// byEnd returns the statement that finds ids whose digits, in reverse order, are at least $1 and less than $2.
func (o object) byEnd(scoped bool) string {
	end := digitsBackwards("x." + o.id)
	return o.selects() + end + " >= $1 AND " + end + " < $2" + o.of(scoped, end)
}

// Finder finds objects among the rows that a scope includes, in one snapshot of the database.
type Finder struct {
	db    pg.Querier
	scope list.Scope
}

// In returns the finder for a scope that reads by db.
func In(db pg.Querier, scope list.Scope) Finder { return Finder{db, scope} }

// Resolve returns the one object that ref stands for, among the kinds (none given: all kinds that the person may look
// up): a name of a node, a workspace or a tenant, an id, or six or more digits from the beginning or the end of an id.
// A name takes precedence over a part of an id.
func (f Finder) Resolve(ctx context.Context, ref string,
	kinds []readmodelv1.ObjectKind,
) (*readmodelv1.ResolveResponse, error) {
	for _, kind := range kinds {
		if !f.scope.Everything() && !objects[kind].tenants {
			return nil, list.OperatorsOnly()
		}
	}
	if len(kinds) == 0 {
		for _, kind := range names.All[readmodelv1.ObjectKind]() {
			if known, ok := objects[kind]; ok && (f.scope.Everything() || known.tenants) {
				kinds = append(kinds, kind)
			}
		}
	}
	var found []*readmodelv1.ResolveResponse
	for _, kind := range kinds {
		named, err := f.named(ctx, kind, ref)
		if err != nil {
			return nil, err
		}
		found = append(found, named...)
	}
	if len(found) == 0 {
		for _, kind := range kinds {
			parts, err := f.byPart(ctx, kind, ref)
			if err != nil {
				return nil, err
			}
			found = append(found, parts...)
		}
	}
	what := "object"
	if len(kinds) == 1 {
		what = kindText(kinds[0])
	}
	return only(what, ref, found)
}

// only returns the single element of found, and a not_found or an ambiguous fault if there is none or more than one.
func only(what, ref string, found []*readmodelv1.ResolveResponse) (*readmodelv1.ResolveResponse, error) {
	switch len(found) {
	case 0:
		return nil, list.NotFound(what, ref)
	case 1:
		return found[0], nil
	}
	return nil, ambiguous(what, ref, found)
}

func kindText(kind readmodelv1.ObjectKind) string {
	return strings.ReplaceAll(names.Of(kind), "_", " ")
}

var (
	tenantsNamed = pg.Define(pg.RoleReadmodel, "lookup.tenants_named", `
	SELECT t.tenant_id::text AS id, t.name AS text FROM readmodel.tenant t
	WHERE t.name = $1 AND ($2::uuid IS NULL OR t.tenant_id = $2) ORDER BY t.tenant_id LIMIT $3`)
	nodesNamed = pg.Define(pg.RoleReadmodel, "lookup.nodes_named", `
	SELECT n.node_id::text AS id, n.name AS text FROM readmodel.node n
	WHERE n.name = $1 AND n.state <> 'retired' AND ($2::uuid IS NULL OR n.tenant_id = $2) ORDER BY n.node_id LIMIT $3`)
	retiredNodesNamed = pg.Define(pg.RoleReadmodel, "lookup.retired_nodes_named", `
	SELECT n.node_id::text AS id, n.name AS text FROM readmodel.node n
	WHERE n.name = $1 AND n.state = 'retired' AND ($2::uuid IS NULL OR n.tenant_id = $2)
	ORDER BY n.name, n.node_id DESC LIMIT 1`)
	workspacesNamed = pg.Define(pg.RoleReadmodel, "lookup.workspaces_named", `
	SELECT DISTINCT ON (w.tenant_id) w.workspace_id::text AS id, w.tenant || '/' || w.name AS text
	FROM readmodel.workspace w WHERE w.name = $1 AND ($2 = '' OR w.tenant = $2 OR w.tenant_id = $3::uuid)
		AND (w.state <> 'decommissioned' OR NOT $4) AND ($5::uuid IS NULL OR w.tenant_id = $5)
	ORDER BY w.tenant_id, w.workspace_id DESC LIMIT $6`)
)

// named returns the nodes, workspaces or tenants of a name.
func (f Finder) named(ctx context.Context, kind readmodelv1.ObjectKind, ref string) ([]*readmodelv1.ResolveResponse,
	error,
) {
	switch kind { //nolint:exhaustive // nothing else has a name of its own
	case readmodelv1.ObjectKind_OBJECT_KIND_NODE:
		return f.nodesNamed(ctx, ref)
	case readmodelv1.ObjectKind_OBJECT_KIND_WORKSPACE:
		return f.workspacesNamed(ctx, ref)
	case readmodelv1.ObjectKind_OBJECT_KIND_TENANT:
		return f.collect(ctx, kind, tenantsNamed, ref, f.scope.Arg(), Candidates+1)
	}
	return nil, nil
}

// nodesNamed returns the nodes of a name that are not retired; only if there are none, the last that was retired.
func (f Finder) nodesNamed(ctx context.Context, name string) ([]*readmodelv1.ResolveResponse, error) {
	const kind = readmodelv1.ObjectKind_OBJECT_KIND_NODE
	found, err := f.collect(ctx, kind, nodesNamed, name, f.scope.Arg(), Candidates+1)
	if err != nil || len(found) > 0 {
		return found, err
	}
	return f.collect(ctx, kind, retiredNodesNamed, name, f.scope.Arg())
}

// workspacesNamed returns the workspaces of a name, or of tenant/name: for each tenant the live one; only if none is
// live, the last that was decommissioned.
func (f Finder) workspacesNamed(ctx context.Context, ref string) ([]*readmodelv1.ResolveResponse, error) {
	tenant, name, both := strings.Cut(ref, "/")
	if !both {
		tenant, name = "", ref
	}
	if name == "" {
		return nil, nil
	}
	for _, live := range []bool{true, false} {
		found, err := f.collect(ctx, readmodelv1.ObjectKind_OBJECT_KIND_WORKSPACE, workspacesNamed,
			name, tenant, list.OptionalID(strings.ToLower(tenant)), live, f.scope.Arg(), Candidates+1)
		if err != nil || len(found) > 0 {
			return found, err
		}
	}
	return nil, nil
}

// byPart returns objects by an id, or by digits from its beginning or its end. Ids that were made within the same hours
// begin alike, so it reads only as many as are returned as candidates.
func (f Finder) byPart(ctx context.Context, kind readmodelv1.ObjectKind, ref string) ([]*readmodelv1.ResolveResponse,
	error,
) {
	digits := digitsOf(ref)
	if digits == "" {
		return nil, nil
	}
	o := objects[kind]
	args := []any{uuidText(digits, "0"), uuidText(digits, "f"), Candidates + 1}
	if !f.scope.Everything() {
		args = append(args, f.scope.Arg())
	}
	found, err := f.collect(ctx, kind, findByPart.For(partStatement{o, false, !f.scope.Everything()}), args...)
	if err != nil || len(digits) == idDigits || len(found) > Candidates {
		return found, err
	}
	end := reversed(digits)
	args[0], args[1] = end, end+"g" // `g` sorts after every hexadecimal digit
	ends, err := f.collect(ctx, kind, findByPart.For(partStatement{o, true, !f.scope.Everything()}), args...)
	if err != nil {
		return nil, err
	}
	for _, one := range ends {
		if !slices.ContainsFunc(found,
			func(other *readmodelv1.ResolveResponse) bool { return other.GetId() == one.GetId() }) {
			found = append(found, one)
		}
	}
	return found, nil
}

func (f Finder) collect(ctx context.Context, kind readmodelv1.ObjectKind, by *pg.Statement,
	args ...any,
) ([]*readmodelv1.ResolveResponse, error) {
	rows, err := pg.All[list.Pair](ctx, f.db, by, args...)
	if err != nil {
		return nil, fmt.Errorf("resolve %s: %w", kindText(kind), err)
	}
	found := make([]*readmodelv1.ResolveResponse, len(rows))
	for i, row := range rows {
		found[i] = &readmodelv1.ResolveResponse{Kind: kind, Id: row.ID, Name: row.Text}
	}
	return found, nil
}

// IDOf resolves ref to an id: by a whole id, a name or a part of an id, in this order.
func (f Finder) IDOf(ctx context.Context, kind readmodelv1.ObjectKind, ref string) (string, error) {
	finders := []func(context.Context, readmodelv1.ObjectKind, string) ([]*readmodelv1.ResolveResponse,
		error){f.named, f.byPart}
	if len(digitsOf(ref)) == idDigits {
		slices.Reverse(finders)
	}
	for _, find := range finders {
		found, err := find(ctx, kind, ref)
		if err != nil {
			return "", err
		}
		if len(found) > 0 {
			one, err := only(kindText(kind), ref, found)
			return one.GetId(), err
		}
	}
	return "", list.NotFound(kindText(kind), ref)
}

// ambiguous returns the refusal of a reference that stands for several objects. It lists each with its kind, its id and
// its name.
func ambiguous(what, ref string, found []*readmodelv1.ResolveResponse) error {
	choices := make([]string, 0, len(found))
	for _, one := range found {
		choices = append(choices, strings.TrimSpace(kindText(one.GetKind())+" "+one.GetId()+" "+one.GetName()))
	}
	return Ambiguous(what, ref, choices)
}

// Ambiguous returns the refusal of a reference that stands for several objects, with the first of them.
func Ambiguous(what, ref string, choices []string) error {
	choices = slices.Clone(choices[:min(len(choices), Candidates)])
	slices.Sort(choices)
	return fault.New(commonv1.Reason_REASON_AMBIGUOUS, fmt.Sprintf("%q stands for more than one %s", ref, what),
		fault.Unmet(choices...))
}
