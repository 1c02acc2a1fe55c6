use proptest::prelude::*;

use super::parser::MAX_DEPTH;
use super::*;

const LEGAL: &[&str] = &[
    "SELECT * FROM c",
    "select * from c where c.a = 1 order by c.a desc",
    "SELECT 1",
    "SELECT VALUE 1",
    "SELECT VALUE c FROM c",
    "SELECT DISTINCT TOP 10 c.a AS b, c.d FROM c",
    "SELECT TOP @n c.a FROM c",
    "SELECT TOP @n [1]",
    "SELECT * FROM root r WHERE r.a = 1",
    "SELECT * FROM root AS r WHERE r.a = 1",
    "SELECT c.first, c.last, c.all FROM c",
    "SELECT first.a FROM first",
    "SELECT c.True, c.Null, c.UDF FROM c",
    r#"SELECT c["by"], c['order'] FROM c"#,
    r#"SELECT * FROM c WHERE c.a = "double" AND c.b = 'single'"#,
    r#"SELECT * FROM c WHERE c.a = 'a\'b\"\\\/\b\f\n\r\t\u00e9\ud83e\udd80' AND c.b = "it's""#,
    "SELECT * FROM c WHERE c.a = '🦀'",
    "SELECT VALUE [1, -1, +1, 1.5, 1., .5, 1e3, 1.5E-3, 1-1, 2 -1, - 1, -(-1)]",
    "SELECT VALUE [true, false, null, undefined]",
    "SELECT VALUE {}",
    r#"SELECT VALUE {"a": c.a, 'b': [c.b, []]} FROM c"#,
    "SELECT * FROM c WHERE c.a + 1 * 2 / 3 % 4 - 5 > 6 AND c.b & 1 = 1 OR c.c ^ 2 | 3 = ~4",
    "SELECT * FROM c WHERE c.a || 'b' = 'ab' AND c.d != 1 AND c.e <= 1 AND c.f >= 1 AND c.g < 1",
    "SELECT * FROM c WHERE NOT c.a = 1 AND NOT (c.b = 1 OR NOT NOT c.d)",
    "SELECT * FROM c WHERE c.a IN (1, 'b', @p) AND c.b NOT IN (1) OR NOT c.d IN (2)",
    "SELECT * FROM c WHERE c.a = 1 AND c.b BETWEEN 1 AND 5 AND c.d NOT BETWEEN @a AND @b",
    "SELECT * FROM c WHERE c.a LIKE 'a%' AND c.b NOT LIKE '%b' AND c.d LIKE '%!%%' ESCAPE '!'",
    "SELECT c.a ? 1 : 2, c.a ?? c.b ?? 0, c.a ? c.b ? 1 : 2 : c.d ? 3 : 4 FROM c",
    "SELECT COUNT(1) AS n, c.a FROM c GROUP BY c.a, c.b",
    "SELECT VALUE COUNT(1) FROM c",
    "SELECT * FROM c ORDER BY c.a, c.b DESC, c.d ASC OFFSET 1 LIMIT @n",
    "SELECT TOP 10 * FROM c ORDER BY RANK FullTextScore(c.text, 'a'), VectorDistance(c.v, [1, 2]) DESC",
    "SELECT * FROM c ORDER BY VectorDistance(c.v, @v, false)",
    "SELECT t FROM c JOIN t IN c.tags JOIN u IN t.list",
    "SELECT t FROM t IN c.tags",
    "SELECT child.name FROM Families.children[0] child",
    "SELECT children FROM Families.children",
    r#"SELECT * FROM c["a"][-1] AS x"#,
    "SELECT s FROM c JOIN (SELECT VALUE t FROM t IN c.tags WHERE t.a > 1) AS s",
    "SELECT VALUE s FROM (SELECT VALUE c FROM c) s",
    "SELECT * FROM c WHERE EXISTS(SELECT VALUE t FROM t IN c.tags WHERE t = @tag)",
    "SELECT ARRAY(SELECT VALUE t FROM t IN c.tags) AS ts, ALL(SELECT 1), FIRST(SELECT 1), LAST(SELECT 1) FROM c",
    "SELECT (SELECT VALUE 1) AS one, FIRST(c.a) FROM c",
    "SELECT LEFT(c.a, 1), right(c.b, 2), udf.f(c.a, @p)[0].b, NOW() FROM c",
    "SELECT c.a[0][c.b]['d'][@p] FROM c",
    r#"SELECT c._rid, [{"item": c.due}] AS orderByItems, c AS payload FROM c WHERE (c.a = 1) AND true ORDER BY c.due"#,
    r#"SELECT VALUE {"_rid": c._rid, "orderByItems": [{"item": c.a}], "payload": c} FROM c WHERE true ORDER BY c.a"#,
    "SELECT\t*\r\nFROM c",
];

/// Refused texts, each with the part that the error names.
const ILLEGAL: &[(&str, &str)] = &[
    ("", ""),
    ("SELECT", ""),
    ("SELECT * FROM", ""),
    ("SELECT * FROM c WHERE", ""),
    ("SELECT * FROM c WHERE (c.a = 1", ""),
    ("SELECT c.by FROM c", "by"),
    ("SELECT c.BY FROM c", "BY"),
    ("SELECT * FROM c WHERE c.value = 1", "value"),
    ("SELECT * FROM c ORDER BY c.order", "order"),
    ("SELECT c.left FROM c", "left"),
    ("SELECT c.null FROM c", "null"),
    ("SELECT c.udf FROM c", "udf"),
    ("SELECT c.a AS group FROM c", "group"),
    ("SELECT * FROM c AS top", "top"),
    ("SELECT * FROM value", "value"),
    ("SELECT * FROM c JOIN rank IN c.tags", "rank"),
    ("SELECT c.a b FROM c", "b"),
    ("SELECT c.a, FROM c", "FROM"),
    ("SELECT * c.a FROM c", "c"),
    ("SELECT TOP 1.5.5 * FROM c", "FROM"),
    ("SELECT TOP -1 * FROM c", "-"),
    ("SELECT TOP c.a FROM c", "c"),
    ("SELECT * FROM c LIMIT 1", "LIMIT"),
    ("SELECT * FROM c OFFSET 1", ""),
    ("SELECT * FROM c OFFSET 'a' LIMIT 1", "'a'"),
    ("SELECT * FROM c ORDER c.a", "c"),
    ("SELECT * FROM c ORDER BY RANK c.a", "c"),
    ("SELECT * FROM c GROUP BY c.a HAVING c.a > 1", "HAVING"),
    ("SELECT * FROM c ORDER BY c.a WHERE c.a = 1", "WHERE"),
    ("SELECT * FROM c WHERE c.a = 1 c.b", "c"),
    ("SELECT * FROM c WHERE c.a <> 1", ">"),
    ("SELECT * FROM c WHERE c.a == 1", "="),
    ("SELECT * FROM c WHERE c.a = 'it''s'", "'s'"),
    ("SELECT * FROM c WHERE c.a IS NULL", "IS"),
    ("SELECT * FROM c WHERE c.a NOT 1", "1"),
    ("SELECT * FROM c WHERE c.a IN ()", ")"),
    ("SELECT * FROM c WHERE c.a IN (1) = true", "="),
    ("SELECT * FROM c WHERE c.a BETWEEN 1 OR 2", "OR"),
    ("SELECT * FROM c WHERE c.a LIKE 'a' ESCAPE @e", "@e"),
    ("SELECT * FROM c WHERE c.a && c.b", "&"),
    ("SELECT * FROM c WHERE !c.a", "!"),
    ("SELECT * FROM c WHERE c.a >> 1 = 1", ">"),
    ("SELECT * FROM c WHERE c.5 = 1", ".5"),
    ("SELECT VALUE {a: 1}", "a"),
    ("SELECT VALUE {\"a\" 1}", "1"),
    ("SELECT VALUE [1,]", "]"),
    ("SELECT VALUE f(1", ""),
    ("SELECT VALUE exists(1)", "1"),
    ("SELECT VALUE ARRAY", ""),
    ("SELECT VALUE udf.f", ""),
    ("SELECT VALUE c.a ? 1 FROM c", "FROM"),
    ("SELECT * FROM c -- comment", "--"),
    ("SELECT * FROM c /* comment */", "/"),
    ("SELECT * FROM c; SELECT 1", ";"),
    ("SELECT * FROM c WHERE c.a = @", "@"),
    ("SELECT * FROM c WHERE c.é = 1", "é"),
    ("SELECT * FROM @c", "@c"),
    ("SELECT * FROM c WHERE c.a = 'open", "'open"),
    ("SELECT * FROM c WHERE c.a = 'a\\qb'", "'a"),
    ("SELECT * FROM c WHERE c.a = 'a\nb'", "'a"),
    ("SELECT * FROM c WHERE {documentdb-formattableorderbyquery-filter}", "documentdb"),
    ("DELETE FROM c", "DELETE"),
    // Names that can't be resolved.
    ("SELECT c.a", "c"),
    ("SELECT * FROM c WHERE due = 1", "due"),
    ("SELECT * FROM c WHERE c.a = TRUE", "TRUE"),
    ("SELECT * FROM root c WHERE root.a = 1", "root"),
    ("SELECT * FROM c WHERE C.a = 1", "C"),
    ("SELECT * FROM c JOIN t IN tags", "tags"),
    ("SELECT c.a AS b FROM c ORDER BY b", "b"),
    ("SELECT ARRAY(SELECT VALUE t FROM t IN c.tags) FROM c WHERE t = 1", "t"),
];

#[test]
fn legal_texts_are_accepted() {
    for text in LEGAL {
        if let Err(error) = parse(text) {
            panic!("{text}: {error} Expected {}.", error.expected());
        }
    }
}

#[test]
fn the_error_of_an_illegal_text_names_the_refused_part() {
    for (text, found) in ILLEGAL {
        let error = parse(text).expect_err(text);
        assert_eq!(error.found(), *found, "{text}");
        assert_eq!(&text[error.position()..error.end()], *found, "{text}");
        assert!(!error.expected().is_empty(), "{text}");
    }
}

#[test]
fn errors_have_the_services_codes_and_messages() {
    let error = parse("SELECT distinct distinct c.a FROM c").unwrap_err();
    let message = "Syntax error, incorrect syntax near 'distinct'.";
    assert_eq!((error.code(), error.to_string().as_str()), ("SC1001", message));
    let location = serde_json::json!({ "start": 16, "end": 24 });
    let expected =
        serde_json::json!({ "severity": "Error", "location": location, "code": "SC1001", "message": message });
    assert_eq!(error.to_json()["errors"][0], expected);

    let error = parse("SELECT * FROM c WHERE").unwrap_err();
    assert_eq!((error.code(), error.to_string().as_str()), ("SC1002", "Syntax error, unexpected end-of-file."));
    let error = parse("SELECT * FROM c WHERE d.a = 1").unwrap_err();
    assert_eq!((error.code(), error.to_string().as_str()), ("SC2001", "Identifier 'd' could not be resolved."));
}

#[test]
fn strings_are_the_same_in_both_quotes() {
    let decoded = |text: &str| match &lexer::tokens(text).unwrap()[0].kind {
        lexer::TokenKind::Text(value) => value.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(decoded(r#""a'b""#), decoded(r"'a\'b'"));
    assert_eq!(decoded(r"'\ud83e\udd80'"), "🦀");
    assert_eq!(decoded(r"'\ud83e\u0041'"), "\u{fffd}A");
    assert_eq!(decoded(r"'\u0041\u0042'"), "AB");
    assert_eq!(decoded("''"), "");
}

fn dotted(paths: &[Vec<String>]) -> Vec<String> {
    paths.iter().map(|path| path.join(".")).collect()
}

#[test]
fn filter_paths_are_the_properties_that_select_documents() {
    for (text, filters) in [
        ("SELECT c.a FROM c", vec![]),
        ("SELECT * FROM c WHERE c.due <= @now AND (c.lock.until < 1 OR c.due = 2)", vec!["due", "lock.until"]),
        ("SELECT * FROM c WHERE NOT IS_DEFINED(c.slot) AND ARRAY_CONTAINS(@tags, c.tag)", vec!["slot", "tag"]),
        (
            "SELECT * FROM root r WHERE r['a b'][\"by\"] IN (r.x, 1) AND r.l[3].n LIKE 'x'",
            vec!["a b.by", "x", "l.[].n"],
        ),
        ("SELECT * FROM c WHERE c.a[c.i].b = 1", vec!["a", "i"]),
        ("SELECT * FROM c JOIN t IN c.tags WHERE t.name = 'a' AND t.x[0] = 1", vec!["tags.[].name", "tags.[].x.[]"]),
        ("SELECT * FROM c.list l WHERE l.a = 1", vec!["list.a"]),
        ("SELECT * FROM c WHERE EXISTS(SELECT VALUE t FROM t IN c.tags WHERE t.a = c.b)", vec!["tags.[].a", "b"]),
        ("SELECT * FROM c WHERE EXISTS(SELECT VALUE t FROM t IN c.tags)", vec!["tags.[]"]),
        (
            "SELECT s FROM c JOIN (SELECT VALUE t FROM t IN c.tags WHERE t.a = 1) s WHERE s.b = 2",
            vec!["tags.[].a", "tags.[].b"],
        ),
        ("SELECT ARRAY(SELECT VALUE t FROM t IN c.tags WHERE t.a = 1) AS ts FROM c WHERE c.b = 1", vec!["b"]),
        (
            "SELECT * FROM c WHERE c.a BETWEEN c.b AND 5 AND (c.d ? c.e : c.f) ?? c.g",
            vec!["a", "b", "d", "e", "f", "g"],
        ),
        ("SELECT * FROM c WHERE udf.f({'a': c.a}, [c.b], -c.d)", vec!["a", "b", "d"]),
    ] {
        assert_eq!(dotted(parse(text).unwrap().filter_paths()), filters, "{text}");
    }
}

#[test]
fn a_query_reports_its_sort_keys() {
    let query = parse("SELECT * FROM c ORDER BY c.a.b, c[\"value\"] DESC, LOWER(c.d)").unwrap();
    let keys: Vec<_> =
        query.order_by().iter().map(|key| (key.path.as_ref().map(|p| p.join(".")), key.descending)).collect();
    assert_eq!(keys, [(Some("a.b".to_owned()), false), (Some("value".to_owned()), true), (None, false)]);
}

#[test]
fn a_query_reports_its_clauses() {
    let clauses = |text: &str| {
        let query = parse(text).unwrap();
        [query.has_top(), query.has_offset(), query.has_distinct(), query.has_aggregate(), query.has_group_by()]
    };
    assert_eq!(clauses("SELECT * FROM c WHERE COUNT(1) = 1"), [false; 5]);
    assert_eq!(clauses("SELECT TOP 1 * FROM c"), [true, false, false, false, false]);
    assert_eq!(clauses("SELECT * FROM c OFFSET 0 LIMIT 1"), [false, true, false, false, false]);
    assert_eq!(clauses("SELECT DISTINCT c.a FROM c"), [false, false, true, false, false]);
    assert_eq!(clauses("SELECT VALUE 1 + sum(c.a) FROM c"), [false, false, false, true, false]);
    assert_eq!(clauses("SELECT c.a, COUNT(1) AS n FROM c GROUP BY c.a"), [false, false, false, true, true]);
    assert_eq!(clauses("SELECT (SELECT VALUE COUNT(1) FROM t IN c.tags) AS n FROM c"), [false; 5]);
}

#[test]
fn a_query_reports_its_function_calls_and_their_arguments() {
    let text = "SELECT udf.f(c) FROM c WHERE array_contains(@tags, c.tag) AND ARRAY_CONTAINS(c.tags, 'a', true) \
                AND STARTSWITH(c.a || 'b', -@p)";
    let query = parse(text).unwrap();
    let path = |step: &str| Argument::Path(vec![step.to_owned()]);
    let of = |name: &str| {
        query.calls().iter().filter(|call| call.is(name)).map(|call| &call.arguments[..]).collect::<Vec<_>>()
    };
    let parameter = Argument::Parameter("@tags".to_owned());
    let literal = Argument::Literal;
    assert_eq!(of("ARRAY_CONTAINS"), [&[parameter, path("tag")][..], &[path("tags"), literal.clone(), literal][..]]);
    assert_eq!(of("STARTSWITH"), [[Argument::Other, Argument::Other]]);
    assert_eq!(of("f"), Vec::<&[Argument]>::new());
    assert!(query.calls().iter().any(|call| call.is_udf && call.arguments == [Argument::Path(Vec::new())]));
    assert_eq!(query.parameters(), ["@tags", "@p"]);
}

#[test]
fn parameters_are_found_in_every_clause() {
    let text = "SELECT TOP @a @b FROM c JOIN (SELECT VALUE @j) j WHERE c[@d] IN (@e) \
                GROUP BY @f ORDER BY @g OFFSET @h LIMIT @i";
    let mut found = parse(text).unwrap().parameters().to_vec();
    found.sort_unstable();
    assert_eq!(found, ["@a", "@b", "@d", "@e", "@f", "@g", "@h", "@i", "@j"]);
}

#[test]
fn nesting_is_bounded() {
    let nested = |depth: usize| format!("SELECT VALUE {}1{}", "(".repeat(depth), ")".repeat(depth));
    assert!(parse(&nested(MAX_DEPTH - 1)).is_ok());
    let error = parse(&nested(MAX_DEPTH)).unwrap_err();
    assert!(error.to_string().contains("too deeply"), "{error}");
    for (open, inner) in [("[", "1"), ("{'a':", "1"), ("f(", "1"), ("(SELECT VALUE ", "1"), ("1 ? ", "1"), ("c[", "1")]
    {
        let text = format!("SELECT VALUE {}{inner}", open.repeat(30_000));
        assert!(parse(&text).unwrap_err().to_string().contains("too deeply"), "{open}");
    }
}

#[test]
fn texts_over_the_services_limit_are_refused() {
    let text = |length: usize| format!("SELECT 1{}", " ".repeat(length - "SELECT 1".len()));
    assert!(parse(&text(512 * 1024)).is_ok());
    assert!(parse(&text(512 * 1024 + 1)).unwrap_err().to_string().contains("exceeds the maximum limit"));
}

#[test]
fn long_texts_without_nesting_are_accepted() {
    let many = |part: &str| format!("SELECT * FROM c WHERE c.a{}", part.repeat(20_000));
    for part in [" AND c.b = 1", " + 1", " ?? 1", ".a", "[0]", "['a']"] {
        assert!(parse(&many(part)).is_ok(), "{part}");
    }
    assert!(parse(&format!("SELECT VALUE {}1", "NOT -".repeat(20_000))).is_ok());
}

/// Generates texts that resemble queries, so that the parser gets past the first word.
fn nearly_a_query() -> impl Strategy<Value = String> {
    let words = prop::sample::select(vec![
        "SELECT", "VALUE", "TOP", "*", "FROM", "c", "c.a", "AS", "WHERE", "AND", "NOT", "IN", "(", ")", "[", "]", "{",
        "}", "'a'", "\"b\"", ":", ",", ".", "?", "??", "1", "-", "@p", "ORDER", "BY", "RANK", "f(", "EXISTS", "LIKE",
        "JOIN", "BETWEEN", "udf.f", "LEFT", "FIRST", "OFFSET", "LIMIT", "GROUP", "'\\u", "é", "(SELECT",
    ]);
    prop::collection::vec(words, 0..40).prop_map(|words| format!("SELECT {}", words.join(" ")))
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in any::<String>()) {
        let _ = parse(&text);
        let _ = from_emulator(&text);
    }

    #[test]
    fn no_sequence_of_tokens_makes_the_parser_panic(text in nearly_a_query()) {
        if let Err(error) = parse(&text) {
            prop_assert_eq!(&text[error.position()..error.end()], error.found());
        }
    }

    #[test]
    fn texts_translated_back_from_the_emulator_are_legal(value in any::<String>()) {
        let text = format!("SELECT * FROM c WHERE c['by'] = {}", serde_json::to_string(&value).unwrap());
        let query = parse(&text).unwrap();
        let again = parse(&from_emulator(query.emulator_text())).unwrap();
        prop_assert_eq!(again.emulator_text(), query.emulator_text());
    }
}
