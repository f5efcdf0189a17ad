package archtest

import (
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuaas/mesh/internal/policy"
)

// policyDir is the package that lists the policy keys.
const policyDir = "internal/policy"

// proof is a test that changes a policy key and sees what follows.
type proof struct{ dir, test string }

const (
	termsFollow   = "TestTermsFollowThePolicy"
	budgetsFollow = "TestBudgetsFollowThePolicy"
	agentsAreSent = "TestAgentsAreSentThePolicy"
)

// proofs are, for each policy key, the tests that change it and see its effect. Where a key acts in agents, a test sees
// that they are sent it, and inAgents has that of what they do.
var proofs = map[string][]proof{
	policy.RecoveryTokenMaxAgeSeconds: {{"services/recovery/enrol", "TestTheAgeOfARecoveryTokenIsThePolicys"}},
	policy.HeartbeatStaleAfterSeconds: {
		{"services/recovery/drift/judge", "TestTheThresholdOfSilenceIsThePolicys"},
		{"services/recovery/watchdog", "TestSilenceIsAsLongAsThePolicySays"},
	},
	policy.TaskStaleSweepIntervalSeconds: {
		{"services/lifecycle", "TestStaleTasksAreSweptAsOftenAsThePolicySays"},
	},
	policy.AuditDedupeWindowSeconds: {{"internal/audit", "TestTheWindowIsThePolicys"}},
	policy.CertificateTTLSeconds: {
		{"services/recovery/enrol", "TestTheLifeOfACertificateIsThePolicys"},
		{"services/nodeapi", agentsAreSent},
	},
	policy.StreamMaxAgeSeconds: {{"services/nodeapi", "TestAStreamIsReplacedAtTheAgeOfThePolicy"}},
	policy.AutoRecovery: {
		{"services/recovery/enrol", "TestAutoRecoveryOff"},
		{"services/recovery/watchdog", "TestWhatProvesNoEmptiedMachine"},
		{"services/nodeapi", agentsAreSent},
	},
	policy.RecoveryAttemptsPerHour: {
		{"services/recovery/enrol", "TestTheRecoveriesOfAnHour"},
		{"services/nodeapi", agentsAreSent},
	},
	policy.TrustDwellSeconds:         {{"services/nodeapi", agentsAreSent}},
	policy.SagaStepStallSeconds:      {{"services/lifecycle/provision", "TestStallsFollowThePolicy"}},
	policy.SagaWaitReadyStallSeconds: {{"services/lifecycle/provision", "TestStallsFollowThePolicy"}},
	policy.SagaStallSeconds:          {{"services/lifecycle/provision", "TestStallsFollowThePolicy"}},
	policy.SagaRetryLimit:            {{"services/lifecycle/operation", "TestTheLimitOfRetriesIsThePolicys"}},
	policy.SagaCancelGraceSeconds:    {{"services/lifecycle", "TestTheGraceOfACancelIsThePolicys"}},
	policy.ChurnRecreatesPerHour: {
		{"services/recovery/watchdog", "TestBudgetIsExhaustedAndRefills"},
		{"services/recovery/watchdog", "TestPlacementHasItsBudget"},
	},
	policy.BrakeFleetFraction: {
		{"services/recovery/watchdog", "TestTheShareThatEngagesTheBrakeIsThePolicys"},
		{"services/recovery/drift/judge", "TestTheShareOfTheFleetIsThePolicys"},
		{"services/lifecycle/gate", "TestTheShareThatVerdictsCordonIsThePolicys"},
	},
	policy.BrakeIdentityFraction: {{"services/recovery/wave", "TestTheLimitsAreThePolicys"}},
	policy.BrakeIdentityLeast:    {{"services/recovery/wave", "TestTheLimitsAreThePolicys"}},
	policy.WorkloadCrashLoopRestarts: {
		{"services/lifecycle/provision", "TestACrashLoopIsOfAsManyRestartsAsThePolicySays"},
		{"services/nodeapi", agentsAreSent},
	},
	policy.OperationKeyPromiseSeconds:    {{"internal/policy", "TestATermIsNotShorterThanWhatRestsOnIt"}},
	policy.RetentionTasksSeconds:         {{"services/lifecycle", termsFollow}},
	policy.RetentionRunsSeconds:          {{"services/lifecycle", termsFollow}},
	policy.RetentionWorkspacesSeconds:    {{"services/lifecycle", termsFollow}},
	policy.RetentionOperationKeysSeconds: {{"services/lifecycle", termsFollow}},
	policy.RetentionFindingsSeconds:      {{"services/lifecycle", termsFollow}, {"services/readmodel", termsFollow}},
	policy.RetentionIdentitiesSeconds:    {{"services/lifecycle", termsFollow}, {"services/recovery", termsFollow}},
	policy.RetentionCredentialsSeconds:   {{"services/recovery", termsFollow}},
	policy.RetentionRecoveriesSeconds:    {{"services/recovery", termsFollow}, {"services/readmodel", termsFollow}},
	policy.RetentionTimelineSeconds:      {{"services/readmodel", termsFollow}},
	policy.RetentionEventsSeconds:        {{"services/readmodel", termsFollow}},
	policy.RetentionAuditSeconds:         {{"services/readmodel", termsFollow}},
	policy.RetentionAuthoritySeconds:     {{"services/recovery/castore", "TestTheTermIsThePolicys"}},
	policy.FencedReviewSeconds:           {{"services/recovery/fleet", "TestOverdueStatesAreIncidents"}},
	policy.StorageLimitMebibytes:         {{"services/recovery/storage", "TestTheLimitIsThePolicys"}},
	policy.BudgetP0DetectSeconds:         {{"services/recovery/drift/judge", budgetsFollow}},
	policy.BudgetP0RecoverSeconds:        {{"services/recovery/drift/judge", budgetsFollow}},
	policy.BudgetP1DetectSeconds:         {{"services/recovery/drift/judge", budgetsFollow}},
	policy.BudgetP1RecoverSeconds:        {{"services/recovery/drift/judge", budgetsFollow}},
	policy.BudgetP2DetectSeconds:         {{"services/recovery/drift/judge", budgetsFollow}},
	policy.BudgetP2RecoverSeconds:        {{"services/recovery/drift/judge", budgetsFollow}},
}

// inAgents are the tests of the agent's part in what it is sent by the policy: they know no key.
var inAgents = []proof{
	{"agent", "TestACrashLoopIsReportedOnce"},
	{"agent/attempts", "TestTheDwellOutlivesTheProcess"},
	{"agent", "TestWhereThePolicyIsOffOnlyAnOperatorRecovers"},
	{"agent", "TestTheLimitOfAnHourOutlivesTheProcess"},
	{"agent", "TestTrustIsLeftToOperatorsWhereThePolicySaysSo"},
}

// TestEveryPolicyKeyIsProven: each key has a test that names it, in a function that exists in the package that is said
// to have it; and no test is listed for a key that is none.
func TestEveryPolicyKeyIsProven(t *testing.T) {
	tr := load(t)
	constants := keyConstants(t, tr)
	for _, key := range policy.Keys() {
		if len(proofs[key.Name]) == 0 {
			t.Errorf("%s: no test is listed that changes it and sees the effect", key.Name)
		}
		for _, p := range proofs[key.Name] {
			uses, ok := usesOf(tr, p)
			if !ok {
				t.Errorf("%s: %s has no test %s", key.Name, p.dir, p.test)
				continue
			}
			if !uses[constants[key.Name]] && !uses[strconv.Quote(key.Name)] {
				t.Errorf("%s: %s of %s does not name it", key.Name, p.test, p.dir)
			}
		}
	}
	for name := range proofs {
		if _, ok := policy.Lookup(name); !ok {
			t.Errorf("tests are listed for %s, which is no policy key", name)
		}
	}
	for _, p := range inAgents {
		if _, ok := usesOf(tr, p); !ok {
			t.Errorf("%s has no test %s", p.dir, p.test)
		}
	}
}

// TestEveryPolicyKeyIsRead: each key is read by code of a program: by its constant, by the method of policy.Set that
// returns it, or by another rule of package policy. Tests, drills and benches do not count.
func TestEveryPolicyKeyIsRead(t *testing.T) {
	tr := load(t)
	constants := keyConstants(t, tr)
	getters, rules := readersInPolicy(tr)
	reads := map[string]bool{}
	for _, p := range tr.pkgs {
		if p.dir == policyDir || underAny(p.dir, []string{"drill", "bench", "internal/testkit"}) || !importsPolicy(p) {
			continue
		}
		for _, f := range p.files {
			if !f.test {
				readsIn(f.ast, reads)
			}
		}
	}
	for _, key := range policy.Keys() {
		constant := constants[key.Name]
		if !reads[constant] && !reads[getters[constant]] && !rules[constant] {
			t.Errorf("%s: no code outside of tests and drills reads it", key.Name)
		}
	}
}

// likeKey is how a policy key is spelled in a text: two names or more, and the unit or the kind of its value.
var likeKey = regexp.MustCompile("`((?:node|audit|trust|saga|churn|brake|workload|operation|retention|storage|budget)" +
	`\.[a-z0-9_.]+_(?:seconds|fraction|limit|least|restarts|per_hour|recovery|mebibytes))` + "`")

// TestDocumentedPolicyKeysExist: each policy key that a page names is one of the catalogue.
func TestDocumentedPolicyKeysExist(t *testing.T) {
	found := 0
	walk(t, func(rel string) {
		if !strings.HasSuffix(rel, ".md") {
			return
		}
		text, err := os.ReadFile(filepath.Join(root(t), filepath.FromSlash(rel)))
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range likeKey.FindAllSubmatch(text, -1) {
			found++
			if _, ok := policy.Lookup(string(match[1])); !ok {
				t.Errorf("%s names %s, which is no policy key", rel, match[1])
			}
		}
	})
	if found < 10 {
		t.Errorf("only %d policy keys are named in pages", found)
	}
}

// importsPolicy reports whether code of a package, without its tests, has values of package policy.
func importsPolicy(p *pkg) bool {
	return slices.ContainsFunc(p.files, func(f *file) bool {
		return !f.test && slices.Contains(f.imports, module+"/"+policyDir)
	})
}

// readsIn adds the constants of package policy and the methods without arguments that a file uses.
func readsIn(f *ast.File, found map[string]bool) {
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			if sel, ok := n.Fun.(*ast.SelectorExpr); ok && len(n.Args) == 0 {
				found[sel.Sel.Name] = true
			}
		case *ast.SelectorExpr:
			if of, ok := n.X.(*ast.Ident); ok && of.Name == "policy" {
				found[n.Sel.Name] = true
			}
		}
		return true
	})
}

// keyConstants returns the names of the constants of package policy by their values.
func keyConstants(t *testing.T, tr *tree) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, f := range tr.pkgs[policyDir].files {
		ast.Inspect(f.ast, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || f.test || len(spec.Names) != 1 || len(spec.Values) != 1 {
				return true
			}
			if value, ok := spec.Values[0].(*ast.BasicLit); ok && value.Kind == token.STRING {
				if text, err := strconv.Unquote(value.Value); err == nil {
					out[text] = spec.Names[0].Name
				}
			}
			return true
		})
	}
	for _, key := range policy.Keys() {
		if out[key.Name] == "" {
			t.Fatalf("%s has no constant", key.Name)
		}
	}
	return out
}

// readersInPolicy returns the methods of policy.Set that return one key, by the key's constant, and the constants that
// other functions and tables of the package name.
func readersInPolicy(tr *tree) (map[string]string, map[string]bool) {
	getters, rules := map[string]string{}, map[string]bool{}
	for _, f := range tr.pkgs[policyDir].files {
		if f.test || strings.HasSuffix(f.path, "/keys.go") {
			continue
		}
		for _, decl := range f.ast.Decls {
			fn, ok := decl.(*ast.FuncDecl)
			if !ok || !strings.HasSuffix(f.path, "/set.go") || receiver(fn) != "Set." {
				namesIn(decl, rules)
				continue
			}
			found := map[string]bool{}
			namesIn(fn.Body, found)
			for constant := range found {
				getters[constant] = fn.Name.Name
			}
		}
	}
	return getters, rules
}

// namesIn adds the names and the quoted texts in a node to found.
func namesIn(n ast.Node, found map[string]bool) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.Ident:
			found[n.Name] = true
		case *ast.BasicLit:
			found[n.Value] = true
		}
		return true
	})
}

// usesOf returns the names and texts in a test and in the functions and variables of its package's tests that it uses,
// and whether there is the test.
func usesOf(tr *tree, p proof) (map[string]bool, bool) {
	decls := map[string][]ast.Node{}
	for dir, of := range tr.pkgs {
		if dir != p.dir {
			continue
		}
		for _, f := range of.files {
			if f.test {
				declarations(f.ast, decls)
			}
		}
	}
	if !strings.HasPrefix(p.test, "Test") || len(decls[p.test]) == 0 {
		return nil, false
	}
	uses, queue, seen := map[string]bool{}, []string{p.test}, map[string]bool{}
	for len(queue) > 0 {
		name := queue[0]
		queue = queue[1:]
		if seen[name] {
			continue
		}
		seen[name] = true
		for _, decl := range decls[name] {
			found := map[string]bool{}
			namesIn(decl, found)
			for use := range found {
				uses[use] = true
				if !slices.Contains(queue, use) && len(decls[use]) > 0 && !strings.HasPrefix(use, "Test") {
					queue = append(queue, use)
				}
			}
		}
	}
	return uses, true
}

// declarations adds the functions, methods, variables and constants of a file by their names.
func declarations(f *ast.File, decls map[string][]ast.Node) {
	for _, decl := range f.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			if decl.Body != nil {
				decls[decl.Name.Name] = append(decls[decl.Name.Name], decl.Body)
			}
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				if value, ok := spec.(*ast.ValueSpec); ok {
					for _, name := range value.Names {
						decls[name.Name] = append(decls[name.Name], value)
					}
				}
			}
		}
	}
}
