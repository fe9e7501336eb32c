"""Small stories from a grammar, in English and Chinese: the plain text that the demo checkpoint learns to continue.

A story is a plot, a list of sentences with slots. All slots of one story are drawn once, so that a hero keeps its name.
"""

import random

SLOTS = {
    "en": {
        "opening": ["Once upon a time", "Long ago", "Once upon a time, long ago", "Many years ago", "A long time ago"],
        "place": [
            "in a quiet village", "in a deep forest", "near a blue lake", "on a green hill", "in a house by the sea",
            "in an old castle", "on a small island", "at the edge of a big city", "beside a wide river",
            "in the mountains",
        ],
        "mood": [
            "small", "curious", "brave", "shy", "clever", "hungry", "cheerful", "lazy", "kind", "young", "careful",
            "proud",
        ],
        "animal": [
            "fox", "rabbit", "bear", "mouse", "cat", "dog", "owl", "frog", "horse", "duck", "turtle", "dragon",
            "lion", "sheep", "squirrel", "wolf", "bird", "robot", "girl", "boy",
        ],
        "friend": [
            "an old owl", "a friendly bee", "a tall giraffe", "a wise turtle", "a little snail", "a singing bird",
            "a gray donkey", "the baker", "the gardener", "a sleepy cat", "a fast hare", "the miller",
        ],
        "name": [
            "Lily", "Tom", "Max", "Mia", "Ben", "Luna", "Oscar", "Ruby", "Leo", "Nina", "Sam", "Ella", "Finn", "Ivy",
            "Hugo", "Zoe", "Otto", "Rosa",
        ],
        "hobby": [
            "sing", "paint", "read books", "dance in the rain", "bake bread", "count the stars", "climb trees",
            "swim", "collect stones", "fly kites", "sleep in the sun", "tell jokes",
        ],
        "weather": ["sunny", "rainy", "windy", "cold", "foggy", "warm", "snowy", "bright"],
        "time": ["morning", "day", "evening", "afternoon", "night"],
        "thing": [
            "key", "red hat", "silver bell", "lantern", "golden coin", "wooden boat", "blue scarf", "map",
            "music box", "little drum", "letter", "shiny button",
        ],
        "where": [
            "under the bed", "behind the door", "in the garden", "at the market", "under a stone", "near the well",
            "in the tall grass", "on the roof", "by the bridge", "inside a hollow tree",
        ],
        "there": ["in a nest", "in a basket", "under a leaf", "in the sand", "on a branch", "in the snow", "in a pot"],
        "skill": ["fly a kite", "ride a bike", "play the flute", "swim", "whistle", "skate", "cook soup", "juggle"],
        "food": ["warm soup", "honey cake", "apple pie", "fresh bread", "berries", "hot cocoa", "pancakes", "cheese"],
        "seed": ["a tiny seed", "a round bean", "a brown nut", "a bulb", "a plum stone", "a grain of corn"],
        "plant": ["a tall tree", "a yellow flower", "a bush full of berries", "a big pumpkin", "a rose", "a vine"],
        "trouble": [
            "the bridge was broken", "the lamp went out", "the snow closed the road", "the river rose",
            "the wind took the roof", "the well was dry", "the mill stood still",
        ],
        "moral": [
            "A friend is worth more than gold.", "Nobody is too small to help.", "Patience always pays.",
            "Sharing makes everything better.", "It is never too late to learn.", "Home is where your friends are.",
            "Asking for help is brave.", "Small steps lead far.",
        ],
        "close": [
            "They laughed all the way home.", "That night the stars shone brightly.",
            "They shared {food} and were happy.", "From that day on they were friends.",
            "And they lived happily ever after.", "Then everyone went to sleep.",
        ],
    },
    "zh": {
        "opening": ["从前", "很久很久以前", "很久以前", "有一年", "许多年前"],
        "place": [
            "森林里", "小河边", "大山下", "海边", "一个小村子里", "一座古老的城里", "湖边", "花园里", "山谷里",
            "小岛上",
        ],
        "mood": ["可爱", "聪明", "勇敢", "害羞", "好奇", "快乐", "善良", "懒惰", "细心", "年轻"],
        "animal": [
            "小狐狸", "小兔子", "小熊", "小老鼠", "小猫", "小狗", "青蛙", "小马", "小鸭子", "乌龟", "小龙", "小羊",
            "小鸟", "小猴子", "大象",
        ],
        "friend": ["老猫头鹰", "小蜜蜂", "长颈鹿", "老乌龟", "蜗牛", "百灵鸟", "灰驴", "面包师", "园丁", "老奶奶"],
        "name": ["小花", "阿宝", "豆豆", "明明", "乐乐", "圆圆", "小雨", "星星", "冬冬", "月月", "毛毛", "天天"],
        "hobby": ["唱歌", "画画", "看书", "跳舞", "烤面包", "数星星", "爬树", "游泳", "捡石头", "放风筝", "晒太阳", "讲笑话"],
        "weather": ["晴朗", "下雨", "刮风", "寒冷", "有雾", "温暖", "下雪"],
        "time": ["早晨", "中午", "傍晚", "下午", "夜晚"],
        "thing": ["钥匙", "红帽子", "银铃", "灯笼", "金币", "小木船", "蓝围巾", "地图", "音乐盒", "小鼓", "信"],
        "where": ["床下", "门后", "花园里", "集市上", "石头下", "井边", "草丛里", "屋顶上", "桥边", "树洞里"],
        "there": ["鸟窝里", "篮子里", "叶子下", "沙子里", "树枝上", "雪地里", "罐子里"],
        "skill": ["放风筝", "骑车", "吹笛子", "游泳", "吹口哨", "滑冰", "做汤", "写字"],
        "food": ["热汤", "蜂蜜蛋糕", "苹果派", "新鲜的面包", "草莓", "饺子", "月饼", "包子"],
        "seed": ["一粒种子", "一颗豆子", "一颗坚果", "一粒玉米", "一颗桃核"],
        "plant": ["一棵大树", "一朵黄花", "一个大南瓜", "一株玫瑰", "一片竹子", "一根长藤"],
        "trouble": ["桥断了", "灯灭了", "大雪封了路", "河水涨了", "大风吹走了屋顶", "井干了", "磨坊停了"],
        "moral": [
            "朋友比金子更珍贵。", "再小的人也能帮忙。", "耐心总有回报。", "分享让一切更美好。", "学习永远不晚。",
            "有朋友的地方就是家。", "一步一步能走很远。",
        ],
        "close": [
            "他们笑着回家了。", "那天夜里，星星特别亮。", "他们一起吃{food}，非常开心。",
            "从那以后，他们成了好朋友。", "大家都睡得很香。", "他们从此过着幸福的生活。",
        ],
    },
}  # fmt: skip

PLOTS = {
    "en": [
        "{opening}, {place}, there lived a {mood} {animal} named {name}. {name} loved to {hobby}. One {weather} {time}, "
        "{name} lost a {thing}. {name} looked {where}, but it was not there. Then {friend} came by and found the {thing} "
        "{there}. {close} {moral}",
        "{opening}, a {mood} {animal} named {name} lived {place}. One {weather} {time}, {name} found a {thing} {where}. "
        '"Whose is it?" asked {name}. {name} asked everyone, and at last {friend} said: "It is mine!" {name} gave it back '
        "and got {food}. {close} {moral}",
        "{opening}, there was a {mood} {animal} named {name} who could not {skill}. {name} tried every {time} {where}, but "
        'it was hard. "Try again," said {friend}, "and do it slowly." After many days {name} could {skill} better than '
        "anyone. {close} {moral}",
        "{opening}, {place}, a {mood} {animal} named {name} planted {seed} {where}. Every {time} {name} gave it water. "
        "Nothing happened for a long time, and {friend} laughed. But one {weather} {time} there stood {plant}! {name} "
        "danced. {close} {moral}",
        "{opening}, there lived a {mood} {animal} {place}. Its name was {name}. One {weather} {time} {trouble}, and nobody "
        "knew what to do. {name} took a {thing} and ran to {friend}. Together they worked until {time}, and all was well. "
        "{close} {moral}",
        "{opening}, {place}, {name} the {animal} wanted to {hobby}. But it was a {weather} {time}, and {name} was alone. "
        '{friend} knocked at the door. "I brought {food}," said the guest. They ate, and then they learned to {skill}. '
        "{close} {moral}",
    ],
    "zh": [
        "{opening}，{place}住着一只{mood}的{animal}，名叫{name}。{name}喜欢{hobby}。一个{weather}的{time}，{name}丢了{thing}。"
        "{name}找了{where}，可是没有找到。后来{friend}来了，在{there}找到了{thing}。{close}{moral}",
        "{opening}，{place}有一只{mood}的{animal}叫{name}。一个{weather}的{time}，{name}在{where}捡到了{thing}。“这是谁的？”{name}问。"
        "{friend}说：“是我的！”{name}把{thing}还给了他，得到了{food}。{close}{moral}",
        "{opening}，有一只{mood}的{animal}叫{name}，不会{skill}。{name}每天{time}都在{where}练习，可是很难。{friend}说：“慢慢来，再试一次。”"
        "很多天以后，{name}学会了{skill}。{close}{moral}",
        "{opening}，{place}的{name}是一只{mood}的{animal}。{name}在{where}种下了{seed}，每天{time}给它浇水。{friend}笑话它。"
        "一个{weather}的{time}，那里长出了{plant}！{close}{moral}",
        "{opening}，{place}住着{animal}{name}。一个{weather}的{time}，{trouble}，谁也不知道怎么办。{name}拿着{thing}去找{friend}。"
        "他们一起干到{time}，一切都好了。{close}{moral}",
    ],
}  # fmt: skip


def story(rng: random.Random, language: str, hero: str | None = None) -> str:
    """One story; `hero` is one of the language's animals, None: any."""
    slots = {name: rng.choice(choices) for name, choices in SLOTS[language].items()}
    if hero is not None:
        slots["animal"] = hero
    text = rng.choice(PLOTS[language]).replace("{close}", slots["close"]).format(**slots)
    sentences = text.split(". ")  # a friend may come first in a sentence
    return ". ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences)
