//! Determines which properties a query filters and orders by, which functions it calls and which parameters it needs.

use super::error::SyntaxError;
use super::syntax::{Collection, Expression, Function, Name, Select, Selection, Sort, Source, Step};
use super::{Argument, Call, Query, SortKey};

/// The step of a path that stands for the elements of an array.
pub(crate) const ELEMENTS: &str = "[]";

const AGGREGATES: &[&str] =
    &["ARRAY_AGG", "AVG", "COUNT", "COUNTIF", "DCOUNT", "MAKELIST", "MAKESET", "MAX", "MIN", "SUM"];

/// A path from the document to a value in it, or `None` if only the execution of the query determines the value.
type Path = Option<Vec<String>>;

/// Reads a syntax tree, and refuses names that neither FROM nor JOIN introduces.
pub(super) fn read(select: &Select) -> Result<Query, SyntaxError> {
    let mut reader = QueryReader { query: Query::default(), unresolved: None };
    let scope = reader.select(select, &Scope::default(), Role::Source);
    let sort = |sort: &Sort| SortKey { path: path_of(&sort.key, &scope), descending: sort.descending };
    let mut query = reader.query;
    query.order_by = select.order_by.iter().map(sort).collect();
    query.has_top = select.top.is_some();
    query.has_offset = !select.window.is_empty();
    query.has_distinct = select.distinct;
    query.has_group_by = !select.group_by.is_empty();
    query.has_aggregate = selected(&select.selection).iter().any(has_aggregate);
    match reader.unresolved {
        Some(name) => Err(SyntaxError::unresolved(name.start, &name.name)),
        None => Ok(query),
    }
}

/// The names that FROM and JOIN have introduced, inner ones last.
#[derive(Clone, Default)]
struct Scope {
    names: Vec<(String, Path)>,
}

impl Scope {
    fn find(&self, name: &str) -> Option<&Path> {
        self.names.iter().rev().find(|(known, _)| known == name).map(|(_, path)| path)
    }

    fn add(&mut self, name: String, path: Path) {
        self.names.push((name, path));
    }
}

/// The role of a SELECT in the query.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The whole query, or one of its inputs.
    Source,
    /// Part of a filter.
    Filter,
    /// Part of the result. Its own filters do not select documents.
    Projection,
}

struct QueryReader {
    query: Query,
    /// The first name that can't be resolved.
    unresolved: Option<Name>,
}

impl QueryReader {
    /// Reads a SELECT inside `outer` and returns its names.
    fn select(&mut self, select: &Select, outer: &Scope, role: Role) -> Scope {
        let mut scope = outer.clone();
        for collection in &select.from {
            // A subquery in a filter without its own filter tests whether its input has elements.
            let filters = role == Role::Filter && select.filter.is_none();
            self.collection(collection, &mut scope, role, filters);
        }
        let selected = selected(&select.selection).iter().chain(&select.top);
        for expression in selected.chain(&select.group_by).chain(&select.window) {
            self.expression(expression, &scope, false);
        }
        for sort in &select.order_by {
            self.expression(&sort.key, &scope, false);
        }
        if let Some(filter) = &select.filter {
            self.expression(filter, &scope, role != Role::Projection);
        }
        scope
    }

    /// Reads an input and adds its name to the scope.
    fn collection(&mut self, collection: &Collection, scope: &mut Scope, role: Role, filters: bool) {
        let mut path = match &collection.source {
            Source::Path { root, steps } => self.source(root, steps, scope),
            Source::Query(select) => {
                let inner = self.select(select, scope, role);
                value_of(select, &inner)
            }
        };
        if collection.iterates {
            path = path.map(|path| extended(path, ELEMENTS));
        }
        if filters {
            self.filter(&path);
        }
        if let Some(name) = collection.alias.clone().or_else(|| own_name(&collection.source)) {
            scope.add(name, path);
        }
    }

    /// Returns the path of an input. The first input is the container, whatever its name. Every other one begins at a
    /// known name.
    fn source(&mut self, root: &Name, steps: &[Step], scope: &Scope) -> Path {
        let start = match scope.find(&root.name) {
            Some(path) => path.clone(),
            None if scope.names.is_empty() => Some(Vec::new()),
            None => {
                self.resolve(root, scope);
                None
            }
        };
        walked(start, steps)
    }

    fn expression(&mut self, expression: &Expression, scope: &Scope, filters: bool) {
        if filters {
            self.filter(&path_of(expression, scope));
        }
        match expression {
            Expression::Literal | Expression::Text(_) => {}
            Expression::Parameter(name) => self.parameter(name),
            Expression::Name(name) => self.resolve(name, scope),
            Expression::Member { base, steps } => self.member(base, steps, scope, filters),
            Expression::Call(call) => self.call(call, scope, filters),
            Expression::Subquery(select) => {
                self.select(select, scope, if filters { Role::Filter } else { Role::Projection });
            }
            Expression::Parts(parts) => self.all(parts, scope, filters),
        }
    }

    fn all(&mut self, expressions: &[Expression], scope: &Scope, filters: bool) {
        for expression in expressions {
            self.expression(expression, scope, filters);
        }
    }

    fn member(&mut self, base: &Expression, steps: &[Step], scope: &Scope, filters: bool) {
        // The complete path is recorded already, unless it begins with an expression other than a name.
        let begins_at_name = matches!(base, Expression::Name(_));
        self.expression(base, scope, filters && !begins_at_name);
        for step in steps {
            if let Step::Computed(index) = step {
                self.expression(index, scope, filters);
            }
        }
    }

    fn call(&mut self, call: &Function, scope: &Scope, filters: bool) {
        let arguments = call.arguments.iter().map(|argument| argument_of(argument, scope)).collect();
        self.query.calls.push(Call { name: call.name.clone(), is_udf: call.is_udf, arguments });
        self.all(&call.arguments, scope, filters);
    }

    fn parameter(&mut self, name: &str) {
        if !self.query.parameters.iter().any(|known| known == name) {
            self.query.parameters.push(name.to_owned());
        }
    }

    fn filter(&mut self, path: &Path) {
        if let Some(path) = path.as_ref().filter(|path| !path.is_empty()) {
            if !self.query.filters.contains(path) {
                self.query.filters.push(path.clone());
            }
        }
    }

    fn resolve(&mut self, name: &Name, scope: &Scope) {
        if scope.find(&name.name).is_none() && self.unresolved.is_none() {
            self.unresolved = Some(name.clone());
        }
    }
}

fn selected(selection: &Selection) -> &[Expression] {
    match selection {
        Selection::Star => &[],
        Selection::Value(value) => std::slice::from_ref(value),
        Selection::List(items) => items,
    }
}

/// Returns the path that a SELECT VALUE yields.
fn value_of(select: &Select, scope: &Scope) -> Path {
    match &select.selection {
        Selection::Value(value) => path_of(value, scope),
        _ => None,
    }
}

/// Returns the name of an input without an alias: the last property of its path.
fn own_name(source: &Source) -> Option<String> {
    let Source::Path { root, steps } = source else { return None };
    match steps.last() {
        None => Some(root.name.clone()),
        Some(Step::Property(name)) => Some(name.clone()),
        Some(_) => None,
    }
}

fn path_of(expression: &Expression, scope: &Scope) -> Path {
    match expression {
        Expression::Name(name) => scope.find(&name.name).cloned().flatten(),
        Expression::Member { base, steps } => walked(path_of(base, scope), steps),
        _ => None,
    }
}

/// Extends a path by the known steps, up to the first computed one.
fn walked(start: Path, steps: &[Step]) -> Path {
    let mut path = start?;
    for step in steps {
        match step {
            Step::Property(name) => path.push(name.clone()),
            Step::Element => path.push(ELEMENTS.to_owned()),
            Step::Computed(_) => break,
        }
    }
    Some(path)
}

fn extended(mut path: Vec<String>, step: &str) -> Vec<String> {
    path.push(step.to_owned());
    path
}

fn argument_of(argument: &Expression, scope: &Scope) -> Argument {
    match argument {
        Expression::Literal | Expression::Text(_) => Argument::Literal,
        Expression::Parameter(name) => Argument::Parameter(name.clone()),
        other => path_of(other, scope).map_or(Argument::Other, Argument::Path),
    }
}

/// Whether an expression aggregates. Aggregates inside subqueries do not count.
fn has_aggregate(expression: &Expression) -> bool {
    match expression {
        Expression::Call(call)
            if !call.is_udf && AGGREGATES.iter().any(|name| name.eq_ignore_ascii_case(&call.name)) =>
        {
            true
        }
        Expression::Call(call) => call.arguments.iter().any(has_aggregate),
        Expression::Parts(parts) => parts.iter().any(has_aggregate),
        Expression::Member { base, .. } => has_aggregate(base),
        _ => false,
    }
}
