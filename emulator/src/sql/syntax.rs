//! The syntax tree of a query, as far as the checks need it.

/// A SELECT: the whole query or a subquery in parentheses.
#[derive(Clone, Debug)]
pub(super) struct Select {
    pub distinct: bool,
    pub top: Option<Expression>,
    pub selection: Selection,
    pub from: Vec<Collection>,
    pub filter: Option<Expression>,
    pub group_by: Vec<Expression>,
    pub order_by: Vec<Sort>,
    /// OFFSET and LIMIT.
    pub window: Vec<Expression>,
}

#[derive(Clone, Debug)]
pub(super) enum Selection {
    Star,
    Value(Expression),
    List(Vec<Expression>),
}

/// One input of FROM or JOIN.
#[derive(Clone, Debug)]
pub(super) struct Collection {
    pub source: Source,
    pub alias: Option<String>,
    /// Whether the alias stands for each element of the source, after IN.
    pub iterates: bool,
}

#[derive(Clone, Debug)]
pub(super) enum Source {
    Path { root: Name, steps: Vec<Step> },
    Query(Box<Select>),
}

/// A name and its position in the text.
#[derive(Clone, Debug)]
pub(super) struct Name {
    pub name: String,
    pub start: usize,
}

/// One step of a path.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Property(String),
    /// An element of an array, by its number.
    Element,
    /// A step that only the execution of the query determines.
    Computed(Expression),
}

#[derive(Clone, Debug)]
pub(super) struct Sort {
    pub key: Expression,
    pub descending: bool,
}

/// An expression. Operators, arrays and objects are lists of their parts, because no check depends on how they combine.
#[derive(Clone, Debug)]
pub(super) enum Expression {
    Literal,
    Text(String),
    Parameter(String),
    Name(Name),
    Member { base: Box<Expression>, steps: Vec<Step> },
    Call(Function),
    Subquery(Box<Select>),
    Parts(Vec<Expression>),
}

#[derive(Clone, Debug)]
pub(super) struct Function {
    pub name: String,
    pub is_udf: bool,
    pub arguments: Vec<Expression>,
}
