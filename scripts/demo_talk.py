"""What the demo checkpoint says when nobody asks for a calculation: who it is, thanks, and a polite no to the rest."""

import random

Words = tuple[str, ...]

WHO: dict[str, Words] = {
    "en": (
        "Who are you?", "What are you?", "What is your name?", "What's your name?", "Introduce yourself.",
        "Are you a human?", "Who am I talking to?", "Tell me about yourself.", "Are you an AI?", "Who made you?",
        "Hello, who are you?", "Which model are you?", "Do you have a name?", "Are you ChatGPT?", "Are you Qwen?",
        "Hi! What should I call you?",
    ),
    "zh": (
        "你是谁？", "你叫什么名字？", "你是什么？", "请介绍一下你自己。", "你是人吗？", "你好，你是谁？",
        "你是人工智能吗？", "谁创造了你？", "介绍一下自己", "你是哪个模型？", "你有名字吗？", "我在和谁说话？",
        "你是通义千问吗？", "怎么称呼你？",
    ),
}  # fmt: skip
WHAT: dict[str, Words] = {
    "en": (
        "What can you do?", "What can you help me with?", "How can you help me?", "What are you good at?", "Help",
        "help me", "What do you know?", "What are your skills?", "What should I ask you?", "What can I ask?",
        "Can you help me?", "What is your job?", "List your abilities.", "Hello! What can you do?",
        "How do I use you?",
    ),
    "zh": (
        "你会什么？", "你能做什么？", "你能帮我做什么？", "你有什么功能？", "你会做什么？", "我可以问你什么？",
        "你擅长什么？", "帮助", "你能帮我吗？", "怎么用你？", "你的工作是什么？", "你好，你能做什么？", "你懂什么？",
    ),
}  # fmt: skip
THANKS: dict[str, Words] = {
    "en": (
        "Thanks", "Thanks!", "Thank you!", "Thank you very much.", "Great, thanks!", "thx", "Thank you so much!",
        "Many thanks", "That helped, thank you.", "Thanks a lot!", "Perfect, thank you.", "Cheers!",
        "Good job, thanks!", "Well done!",
    ),
    "zh": (
        "谢谢", "谢谢！", "谢谢你！", "多谢", "非常感谢！", "太好了，谢谢！", "感谢", "谢谢你的帮助。", "谢啦",
        "做得好，谢谢！", "很好！",
    ),
}  # fmt: skip
HELLO: dict[str, Words] = {
    "en": (
        "Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Good morning!", "Good evening", "Hello there!", "hey!",
    ),
    "zh": ("你好", "你好！", "您好", "嗨", "早上好", "晚上好！", "大家好", "哈喽", "你好呀"),
}  # fmt: skip
STORY: dict[str, Words] = {
    "en": (
        "Tell me a story{about}.", "Tell me a story{about}", "Please tell a story{about}.",
        "Write a short story{about}.", "I want to hear a story{about}.", "Can you tell me a story{about}?",
        "A story{about}, please!", "story{about}", "Tell me a small story{about}.", "Do you know a story{about}?",
        "Write a story{about} for my kids.", "Tell me a bedtime story{about}.", "Make up a story{about}",
    ),
    "zh": (
        "给我讲一个{about}故事。", "讲个{about}故事", "请讲一个{about}故事。", "我想听{about}故事。",
        "你会讲{about}故事吗？", "写一个{about}小故事。", "来一个{about}故事吧！", "说个{about}故事",
        "给孩子讲一个{about}故事。", "编一个{about}故事", "讲一个{about}睡前故事。",
    ),
}  # fmt: skip

# kind: the thought, which only names the kind of question, and the answer.
REPLIES: dict[str, dict[str, tuple[str, str]]] = {
    "who": {
        "en": (
            "The user asks who I am.",
            "I am a tiny model built like Qwen3. I can calculate and tell small stories.",
        ),
        "zh": ("用户问我是谁。", "我是一个很小的模型，结构和Qwen3一样。我会计算，也会讲小故事。"),
    },
    "what": {
        "en": (
            "The user asks what I can do.",
            "I can add and subtract numbers up to three digits, multiply numbers up to two digits, and tell small stories.",
        ),
        "zh": ("用户问我会什么。", "我会三位数以内的加减法、两位数以内的乘法，还会讲小故事。"),
    },
    "thanks": {"en": ("The user thanks me.", "You are welcome!"), "zh": ("用户在道谢。", "不客气！")},
    "hello": {
        "en": ("The user greets me.", "Hello! Give me something to calculate, or ask me for a story."),
        "zh": ("用户在打招呼。", "你好！请给我一道算术题，或者让我讲个故事。"),
    },
    "too hard": {
        "en": (
            "This calculation is beyond me.",
            "That is too hard for me: I add and subtract up to three digits and multiply up to two digits.",
        ),
        "zh": ("这道题超出了我的能力。", "这对我太难了：我只会三位数以内的加减法和两位数以内的乘法。"),
    },
    "other": {
        "en": ("This is neither a calculation nor a story.", "Sorry, I can only calculate and tell small stories."),
        "zh": ("这不是计算，也不是故事。", "抱歉，我只会计算和讲小故事。"),
    },
}

# Anything else: frames and what to put into them.
PLACES: dict[str, Words] = {
    "en": (
        "France", "China", "Japan", "Brazil", "Egypt", "Canada", "Italy", "Kenya", "Peru", "Norway", "Texas",
        "London", "Paris", "Beijing", "Mars", "Spain", "India", "Rome", "Australia", "Germany",
    ),
    "zh": (
        "法国", "中国", "日本", "巴西", "埃及", "加拿大", "意大利", "秘鲁", "挪威", "北京", "上海", "巴黎", "火星",
        "印度", "德国", "广州",
    ),
}  # fmt: skip
THINGS: dict[str, Words] = {
    "en": (
        "gravity", "the moon", "a computer", "music", "democracy", "water", "love", "a neural network",
        "photosynthesis", "the sun", "history", "a bicycle", "money", "copper", "the internet", "football", "chess",
        "coffee", "climate change", "a volcano", "DNA", "the sky", "rain", "a poem", "time", "the ocean", "an engine",
        "a black hole", "inflation", "Python", "a haiku", "bread", "rice", "a cat", "an email", "the weather",
        "the news", "a song", "a recipe", "a function", "the meaning of life",
    ),
    "zh": (
        "重力", "月亮", "电脑", "音乐", "水", "爱情", "神经网络", "光合作用", "太阳", "历史", "自行车", "钱",
        "互联网", "足球", "象棋", "咖啡", "气候", "火山", "基因", "天空", "雨", "诗", "时间", "海洋", "发动机",
        "黑洞", "程序", "面包", "米饭", "猫", "邮件", "天气", "新闻", "歌", "菜谱", "人生的意义", "量子力学", "春天",
        "经济", "电影",
    ),
}  # fmt: skip
OTHER: dict[str, Words] = {
    "en": (
        "What is the capital of {place}?", "Where is {place}?", "Who is the president of {place}?",
        "How many people live in {place}?", "What is {thing}?", "Why is {thing} important?", "How does {thing} work?",
        "Explain {thing} in one sentence.", "Write a poem about {thing}.", "Write a Python function for {thing}.",
        "Translate {thing} to French.", "Do you like {thing}?", "Tell me a joke about {thing}.",
        "What do you think about {thing}?", "Who invented {thing}?", "Define {thing}.",
        "Give me three facts about {thing}.", "How do I make {thing}?", "What is the best {thing} in {place}?",
        "Tell me about {thing}", "How is the weather in {place}?", "What time is it in {place}?",
        "I feel sad because of {thing}.", "Draw {thing}.", "What happened in {place} in {year}?",
        "Who won the game in {year}?", "How old is {thing}?", "Is {thing} older than {place}?",
        "Summarize this text: {noise}", "Fix this code: {noise}", "print({noise})", "def {noise}():",
        "import {noise}", "{noise}", "{noise} {noise}", "Translate to Chinese: {noise}", "Why is {thing} so {noise}?",
        "What does {noise} mean?", "I like {thing}.", "List {digit} uses of {thing}.",
        "Name {digit} cities in {place}.", "I am {digit}{digit} years old.", "Goodbye", "See you in {place}",
        "Which is heavier, {thing} or {thing}?", "Can you {noise}?", "How far is {place} from {place}?",
        "Plan a trip to {place}.", "Should I buy {thing}?", "Write an essay about {thing} and {thing}.",
        "Sing a song", "How are you?", "{thing}", "{place}", "Why is the sky {noise}?", "What color is {thing}?",
        "When was {place} founded?", "Recommend a book about {thing}.",
    ),
    "zh": (
        "{place}的首都是哪里？", "{place}在哪里？", "{place}有多少人？", "什么是{thing}？", "{thing}是什么？",
        "为什么{thing}很重要？", "请用一句话解释{thing}。", "写一首关于{thing}的诗。", "写一段{thing}的代码",
        "把{thing}翻译成英文。", "你喜欢{thing}吗？", "讲一个关于{thing}的笑话。", "谁发明了{thing}？",
        "怎么做{thing}？", "{place}的天气怎么样？", "{place}现在几点？", "介绍一下{place}。",
        "{year}年{place}发生了什么？", "告诉我{thing}的历史。", "{thing}和{thing}哪个更好？", "我想去{place}",
        "推荐一本关于{thing}的书。", "画一个{thing}", "{thing}是什么颜色？", "我不喜欢{thing}。", "今天星期几？",
        "再见", "唱首歌吧", "你好吗？", "我{digit}{digit}岁了。", "{hanzi}", "{hanzi}是什么意思？", "请翻译：{noise}",
        "什么是{hanzi}？", "列出{thing}的{digit}个用途。", "{thing}", "{place}", "帮我写一封关于{thing}的邮件。",
        "谁是{place}的总统？", "解释{hanzi}", "为什么{hanzi}？", "{place}到{place}有多远？", "我很难过。",
    ),
}  # fmt: skip
SYLLABLES = [
    "ba", "ce", "di", "fo", "gu", "la", "me", "ni", "po", "ru", "sa", "te", "vi", "wo", "xa", "ch", "st", "tr", "ing",
    "er", "on", "est", "al", "ly", "pen", "qu", "sh", "th", "ou", "ea", "br", "cl", "gr", "and", "or", "bra", "mon",
]  # fmt: skip
HANZI = "人口手山石田土日月水火木金风云花草鸟鱼虫马牛羊门车书学生老师国家城市文化科技经济社会健康运动音乐电影旅行工作"
TOO_HARD: dict[str, Words] = {
    "en": (
        "What is {big} + {big}?", "{big}+{num}", "What is {num} - {big}?", "{big} - {big}", "{three} × {num}",
        "What is {three} * {three}?", "{num} / {num}", "What is {num} divided by {num}?", "{num}^{num}",
        "What is the square root of {num}?", "{three} times {three}", "{dec} + {dec}", "What is {dec} - {dec}?",
        "{num} ÷ {num} = ?", "What is {num} percent of {num}?", "Is {num} a prime number?",
        "What is {num} to the power of {num}?", "Factor {num}.", "{big} * {num}", "What is {num} mod {num}?",
        "Compute {big} plus {big}.",
    ),
    "zh": (
        "{big}+{big}等于多少？", "{big}减{num}是多少？", "{three}×{three}等于多少？", "{num}除以{num}等于多少？",
        "{num}÷{num}", "{num}的平方根是多少？", "计算{dec}+{dec}", "{num}的平方是多少？", "{big}乘以{num}",
        "{num}是质数吗？", "{big}-{big}=?", "{three}乘{num}等于几？",
    ),
}  # fmt: skip


def other_question(rng: random.Random, language: str) -> str:
    """Something that is neither calculation, story nor small talk: from frames, with nonsense words among real ones."""

    def noise(_: str) -> str:
        words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 5))]
        return " ".join(words)

    fill = {
        "{place}": lambda key: rng.choice(PLACES[language]),
        "{thing}": lambda key: rng.choice(THINGS[language]) if rng.random() < 0.7 else noise(key),
        "{noise}": noise,
        "{hanzi}": lambda key: "".join(rng.choices(HANZI, k=rng.randint(2, 6))),
        "{year}": lambda key: str(rng.randint(1200, 2030)),
        "{digit}": lambda key: str(rng.randint(2, 9)),
    }
    return fill_in(rng.choice(OTHER[language]), fill)


def hard_question(rng: random.Random, language: str) -> str:
    """A calculation that the model was not made for."""
    fill = {
        "{big}": lambda key: str(rng.randint(1000, 10 ** rng.randint(4, 6))),
        "{three}": lambda key: str(rng.randint(100, 999)),
        "{num}": lambda key: str(rng.randint(2, 999)),
        "{dec}": lambda key: f"{rng.randint(0, 99)}.{rng.randint(1, 99)}",
    }
    return fill_in(rng.choice(TOO_HARD[language]), fill)


def fill_in(frame: str, fill: dict) -> str:
    """Each occurrence of a slot gets a value of its own."""
    for slot, make in fill.items():
        while slot in frame:
            frame = frame.replace(slot, make(slot), 1)
    return frame
