package workspace

import "testing"

// TestSchemaRolesAreAdmittedAsTheServerCanSay: before Postgres 16 a membership has no options.
func TestSchemaRolesAreAdmittedAsTheServerCanSay(t *testing.T) {
	for version, want := range map[int]string{
		150018: `GRANT workload_logins_5 TO "t_a"`,
		160000: `GRANT workload_logins_5 TO "t_a" WITH INHERIT TRUE, SET FALSE`,
		170002: `GRANT workload_logins_5 TO "t_a" WITH INHERIT TRUE, SET FALSE`,
	} {
		if got := (loginGroup{Name: "workload_logins_5", Version: version}).admit(`"t_a"`); got != want {
			t.Errorf("on Postgres %d the statement is %s, want %s", version, got, want)
		}
	}
}
